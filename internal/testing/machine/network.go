// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// Network is hosts that reach each other through a switch, which is in this process: each host has
// a TUN device, whose packets the switch hands on, or not. So lines can be bad without a kernel
// that has veth and netem.
type Network struct {
	Hosts []*Host

	ports  []*os.File
	moving sync.WaitGroup

	mu     sync.Mutex // guards what follows
	random *rand.Rand
	lines  map[[2]int]Line // by the numbers of two hosts, the smaller one first
}

// Line is what happens to the packets between two hosts.
type Line struct {
	Cut   bool
	Loss  float64       // the chance of each packet
	Delay time.Duration // one way; packets overtake each other
}

const (
	port      = "port0"
	packetMax = 65_000 // bytes
)

// NewNetwork makes n hosts, at most 254, whose losses follow from a seed. Close it once nothing
// runs in them.
func NewNetwork(n int, seed uint64) (*Network, error) {
	w := &Network{lines: map[[2]int]Line{}, random: rand.New(rand.NewPCG(seed, 0))}
	for k := range n {
		h, err := NewHost()
		if err != nil {
			return nil, errors.Join(err, w.Close())
		}
		h.Device, h.Addr = port, netip.AddrFrom4([4]byte{198, 51, 100, byte(1 + k)})
		w.Hosts = append(w.Hosts, h)
		if err := w.plug(h); err != nil {
			return nil, errors.Join(err, w.Close())
		}
	}
	for k := range w.ports {
		w.moving.Go(func() { w.move(k) })
	}
	return w, nil
}

// plug makes the device of a host.
func (w *Network) plug(h *Host) error {
	err := h.Do(func() error {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err != nil {
			return &driver.UnavailableError{Backend: "tun", Reason: "/dev/net/tun: " + err.Error(),
				Fix: "modprobe tun"}
		}
		r, err := unix.NewIfreq(port)
		if err == nil {
			r.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
			err = unix.IoctlIfreq(fd, unix.TUNSETIFF, r)
		}
		if err != nil {
			return errors.Join(fmt.Errorf("make a TUN device: %w", err), unix.Close(fd))
		}
		w.ports = append(w.ports, os.NewFile(uintptr(fd), port))
		return nil
	})
	if err != nil {
		return err
	}
	return errors.Join(h.ip("address", "add", h.Addr.String()+"/24", "dev", port),
		h.ip("link", "set", port, "mtu", fmt.Sprint(packetMax), "up"))
}

// move hands on what a host sends, until its port is closed.
func (w *Network) move(from int) {
	packet := make([]byte, packetMax)
	for {
		n, err := w.ports[from].Read(packet)
		if err != nil {
			return
		}
		if n < 20 || packet[0]>>4 != 4 { // no packet of IPv4
			continue
		}
		to := int(packet[19]) - 1
		if to < 0 || to >= len(w.ports) || to == from {
			continue
		}
		w.mu.Lock()
		line := w.lines[between(from, to)]
		lost := line.Cut || w.random.Float64() < line.Loss
		w.mu.Unlock()
		switch {
		case lost:
		case line.Delay > 0:
			late := slices.Clone(packet[:n])
			time.AfterFunc(line.Delay, func() { _, _ = w.ports[to].Write(late) })
		default:
			_, _ = w.ports[to].Write(packet[:n]) // a host that takes none loses it
		}
	}
}

func between(a, b int) [2]int { return [2]int{min(a, b), max(a, b)} }

// Change makes the line of two hosts another one, both ways.
func (w *Network) Change(a, b int, line Line) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lines[between(a, b)] = line
}

// Mend makes all lines good ones.
func (w *Network) Mend() {
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(w.lines)
}

// Close ends the switch, and lets the hosts end with the last process in them.
func (w *Network) Close() error {
	var errs []error
	for _, p := range w.ports {
		errs = append(errs, p.Close())
	}
	w.moving.Wait()
	for _, h := range w.Hosts {
		errs = append(errs, h.Close())
	}
	return errors.Join(errs...)
}

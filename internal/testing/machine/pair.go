// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
)

// Pair is two hosts and the cable between them.
type Pair struct{ Near, Far *Host }

// The ends of the cable: addresses for documentation, which no network uses.
const (
	device  = "cable0"
	nearIP  = "192.0.2.1"
	farIP   = "192.0.2.2"
	netmask = "/30"
)

// NewPair makes two hosts that reach each other. Close it.
func NewPair() (*Pair, error) {
	near, err := NewHost()
	if err != nil {
		return nil, err
	}
	far, err := NewHost()
	if err != nil {
		return nil, errors.Join(err, near.Close())
	}
	p := &Pair{near, far}
	if err := p.join(); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// join lays the cable, up at both ends.
func (p *Pair) join() error {
	// A path names the namespace that has no name.
	far := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), p.Far.net.Fd())
	if err := p.Near.ip("link", "add", device, "type", "veth", "peer", "name", device, "netns",
		far); err != nil {
		return err
	}
	for h, address := range map[*Host]string{p.Near: nearIP, p.Far: farIP} {
		h.Device, h.Addr = device, netip.MustParseAddr(address)
		if err := h.ip("address", "add", address+netmask, "dev", device); err != nil {
			return err
		}
		if err := h.Plug(true); err != nil {
			return err
		}
	}
	return nil
}

// Plug takes the host's end of a cable out, or puts it back in.
func (h *Host) Plug(in bool) error {
	state := "down"
	if in {
		state = "up"
	}
	return h.ip("link", "set", device, state)
}

// Close lets both namespaces end with the last process in them, and the cable with
// the first.
func (p *Pair) Close() error { return errors.Join(p.Near.Close(), p.Far.Close()) }

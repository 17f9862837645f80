// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"syscall"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/silence"
)

// listen opens our port and fills in where peers find it.
func (b *Backend) listen() error {
	host, low, high, err := parseListen(b.cfg.Listen)
	if err != nil {
		return fmt.Errorf("config: Listen %q: %w", b.cfg.Listen, err)
	}
	var l net.Listener
	for port := low; ; port++ {
		l, err = net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err == nil || port == high || !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("listen for peers, see Config.Listen: %w", err)
	}
	tcp, ok := l.(*net.TCPListener)
	if !ok {
		return errors.Join(fmt.Errorf("listen at %v: no socket of TCP: %w",
			l.Addr(), driver.ErrNotSupported), l.Close())
	}
	b.listener = tcp
	return b.advertise(tcp.Addr())
}

// parseListen reads "host", "host:port", ":port" and "host:low-high".
func parseListen(s string) (host string, low, high int, err error) {
	if s == "" {
		return "", 0, 0, nil
	}
	host, ports, err := net.SplitHostPort(s)
	if err != nil {
		return "", 0, 0, fmt.Errorf("want host:port, host:low-high, or :port: %w", driver.ErrBounds)
	}
	first, last, ranged := strings.Cut(ports, "-")
	if !ranged {
		last = first
	}
	from, err1 := strconv.ParseUint(first, 10, 16)
	to, err2 := strconv.ParseUint(last, 10, 16)
	if err1 != nil || err2 != nil || from > to || ranged && from == 0 {
		return "", 0, 0, fmt.Errorf("%q are no ports: %w", ports, driver.ErrBounds)
	}
	return host, int(from), int(to), nil
}

func (b *Backend) advertise(at net.Addr) error {
	bound, err := netip.ParseAddrPort(at.String())
	if err != nil {
		return fmt.Errorf("listen at %v: %w", at, err)
	}
	hosts := b.cfg.Advertise
	if len(hosts) == 0 {
		hosts = ownHosts(bound.Addr())
	}
	for _, h := range hosts {
		b.address.places = append(b.address.places,
			net.JoinHostPort(h, strconv.Itoa(int(bound.Port()))))
	}
	return nil
}

// ownHosts lists where a socket that is bound to an address is reached: the loopback only
// where there is nothing else.
func ownHosts(bound netip.Addr) (list []string) {
	if !bound.IsUnspecified() {
		return []string{bound.Unmap().String()}
	}
	addresses, _ := net.InterfaceAddrs() // none is an answer
	for _, a := range addresses {
		p, err := netip.ParsePrefix(a.String())
		if err == nil && p.Addr().IsGlobalUnicast() && len(list) < placesMax {
			list = append(list, p.Addr().Unmap().String())
		}
	}
	if len(list) == 0 {
		list = []string{"127.0.0.1"}
	}
	return list
}

// nearBuffer is the send buffer of a connection within this host: its pages stay in a cache as they
// come round, which is worth a third. For other peers the kernel finds a size as it goes.
const nearBuffer = 384 << 10

// tune has the kernel see to what pulse cannot: see silence.KeepAlive.
func (b *Backend) tune(tcp *net.TCPConn) {
	silence.KeepAlive(tcp, b.cfg.Failure)
	near, _ := tcp.LocalAddr().(*net.TCPAddr)
	far, _ := tcp.RemoteAddr().(*net.TCPAddr)
	if near != nil && far != nil && near.IP.Equal(far.IP) {
		_ = tcp.SetWriteBuffer(nearBuffer) // or as much as the kernel allows
	}
}

// SPDX-License-Identifier: Apache-2.0

package session

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/sluicehq/sluice/driver"
)

// Host is what one machine on a network can be told apart by: an IPv4 address, or the network of
// an IPv6 address, in which a machine may have as many addresses as it likes. The zero Host is
// that of connections without an address, as over Unix sockets.
type Host netip.Prefix

// String implements fmt.Stringer.
func (h Host) String() string {
	p := netip.Prefix(h)
	switch {
	case !p.IsValid():
		return "unknown"
	case p.IsSingleIP():
		return p.Addr().String()
	}
	return p.String()
}

// HostOf returns where a connection comes from.
func HostOf(conn net.Conn) Host {
	at := conn.RemoteAddr()
	if at == nil {
		return Host{}
	}
	from, err := netip.ParseAddrPort(at.String())
	if err != nil {
		return Host{}
	}
	ip := from.Addr().Unmap().WithZone("")
	bits := 64
	if ip.Is4() {
		bits = 32
	}
	p, _ := ip.Prefix(bits) // fails for more bits than an address has
	return Host(p)
}

// HostCount counts what hosts hold of a bound: one host at most half of it, but for the zero Host.
// Its methods may be called by one goroutine at a time.
type HostCount struct {
	Most int // set before use

	sum int
	of  map[Host]int
}

// Sum is what all hosts hold.
func (c *HostCount) Sum() int { return c.sum }

// Share is what a host may hold.
func (c *HostCount) Share(host Host) int {
	if host == (Host{}) {
		return c.Most
	}
	return max(1, c.Most/2)
}

// Fits reports whether a host may hold n more. share: it would have more than its share.
func (c *HostCount) Fits(host Host, n int) (fits, share bool) {
	share = n > c.Share(host)-c.of[host]
	return n <= c.Most-c.sum && !share, share
}

// Take has a host hold one more, or says that it may not: one of what, of which that field of a
// Config allows only so many.
func (c *HostCount) Take(host Host, what, field string) error {
	fits, share := c.Fits(host, 1)
	switch {
	case fits:
		c.Add(host, 1)
		return nil
	case share:
		return fmt.Errorf("%d %s of one host, raise Config.%s: %w", c.of[host], what, field,
			driver.ErrFull)
	}
	return fmt.Errorf("%d %s, raise Config.%s: %w", c.sum, what, field, driver.ErrFull)
}

// Add has a host hold n more, whether they fit or not; n may be negative.
func (c *HostCount) Add(host Host, n int) {
	if c.of == nil {
		c.of = map[Host]int{}
	}
	c.sum += n
	if c.of[host] += n; c.of[host] == 0 {
		delete(c.of, host)
	}
}

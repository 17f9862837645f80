// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
)

// listen opens the ports of the control.
func (b *Backend) listen() error {
	if b.cfg.Listen != "" {
		return b.listenAt(b.cfg.Listen, nil)
	}
	var errs []error
	for _, a := range b.railHosts() {
		if len(b.address.control) == controlsMax {
			break
		}
		if err := b.listenAt(netip.AddrPortFrom(a, 0).String(), nil); err != nil {
			errs = append(errs, err)
		}
	}
	if len(b.listeners) > 0 {
		return nil
	}
	// InfiniBand without an address of IP: whatever this host has.
	if err := b.listenAt(":0", hostAddresses()); err != nil {
		return errors.Join(append(errs, err)...)
	}
	return nil
}

// railHosts lists the addresses of the network devices of our rails.
func (b *Backend) railHosts() (list []netip.Addr) {
	for _, r := range b.rails {
		for _, p := range b.cfg.sysfs.prefixes(r.gid.NetDev) {
			a := p.Addr().Unmap()
			if !a.IsLinkLocalUnicast() && !slices.Contains(list, a) {
				list = append(list, a)
			}
		}
	}
	return list
}

// hostAddresses lists where this host may be reached: the loopback only where there is
// nothing else.
func hostAddresses() (list []netip.Addr) {
	addresses, _ := net.InterfaceAddrs() // none is an answer
	for _, a := range addresses {
		p, err := netip.ParsePrefix(a.String())
		if err == nil && p.Addr().IsGlobalUnicast() {
			list = append(list, p.Addr().Unmap())
		}
	}
	if len(list) == 0 {
		list = append(list, netip.AddrFrom4([4]byte{127, 0, 0, 1}))
	}
	return list
}

// listenAt opens one port. Where it is on all addresses, peers are told these.
func (b *Backend) listenAt(at string, known []netip.Addr) error {
	l, err := net.Listen("tcp", at)
	if err != nil {
		return fmt.Errorf("listen for peers, see Config.Listen: %w", err)
	}
	b.listeners = append(b.listeners, l)
	bound, ok := l.Addr().(*net.TCPAddr)
	if !ok {
		return fmt.Errorf("listen for peers at %v: no address of TCP", l.Addr())
	}
	own, _ := netip.AddrFromSlice(bound.IP)
	switch {
	case !own.IsUnspecified():
		known = []netip.Addr{own.Unmap()}
	case known == nil:
		if known = b.railHosts(); len(known) == 0 {
			known = hostAddresses()
		}
	}
	for _, a := range known[:min(len(known), controlsMax-len(b.address.control))] {
		b.address.control = append(b.address.control, netip.AddrPortFrom(a, uint16(bound.Port)))
	}
	return nil
}

// reachMax is how long one address of several may keep us from the others.
const reachMax = time.Second

// reach connects to the control of an owner, at the first of its addresses that answers;
// those in a network of ours go first.
func (b *Backend) reach(ctx context.Context, a *address) (net.Conn, error) {
	list := slices.Clone(a.control)
	slices.SortStableFunc(list, func(x, y netip.AddrPort) int {
		return b.strange(x.Addr()) - b.strange(y.Addr())
	})
	var errs []error
	for i, at := range list {
		dial := b.dialControl
		if i < len(list)-1 {
			dial = b.dialBriefly
		}
		conn, err := dial(ctx, at)
		if err == nil {
			return conn, nil
		}
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
	}
	return nil, errors.Join(errs...)
}

// dialBriefly gives up when this process has tried for reachMax.
func (b *Backend) dialBriefly(ctx context.Context, at netip.AddrPort) (net.Conn, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	late := fmt.Errorf("%v has not answered in %v: open the firewall for that port, or have the "+
		"owner name other addresses in Config.Listen: %w", at, reachMax, driver.ErrTimeout)
	go func() {
		if clock.Pass(b.cfg.clock, reachMax, ctx.Done(), nil) {
			cancel(late)
		}
	}()
	conn, err := b.dialControl(ctx, at)
	if err != nil && context.Cause(ctx) == late {
		return nil, late
	}
	return conn, err
}

func (b *Backend) dialControl(ctx context.Context, at netip.AddrPort) (net.Conn, error) {
	d := net.Dialer{LocalAddr: b.source(at.Addr())}
	conn, err := d.DialContext(ctx, "tcp", at.String())
	if errors.Is(err, syscall.EADDRNOTAVAIL) {
		d.LocalAddr = nil // the rail's network device is in another namespace
		conn, err = d.DialContext(ctx, "tcp", at.String())
	}
	return conn, err
}

// source is our own address in the network of another, nil for none: hosts with several
// NICs choose routes by it.
func (b *Backend) source(to netip.Addr) net.Addr {
	for _, r := range b.rails {
		if s := r.gid.Subnet; s.IsValid() && s.Contains(to) {
			return net.TCPAddrFromAddrPort(netip.AddrPortFrom(s.Addr(), 0))
		}
	}
	return nil
}

// strange is 0 for an address in a network of our rails, else 1.
func (b *Backend) strange(a netip.Addr) int {
	for _, r := range b.rails {
		if r.gid.Subnet.IsValid() && r.gid.Subnet.Contains(a) {
			return 0
		}
	}
	return 1
}

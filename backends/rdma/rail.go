// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
)

// rail is a port that the backend has opened.
type rail struct {
	index  int
	device Device
	port   Port
	gid    GID
	info   verbs.Rail
	up     atomic.Bool
	gone   atomic.Bool // the device was removed
}

// String returns the rail as it is written in Config.Devices.
func (r *rail) String() string { return r.device.Name + ":" + strconv.Itoa(r.port.Number) }

// usable reports whether its port is up.
func (r *rail) usable() bool { return r.up.Load() && !r.gone.Load() }

// address returns the description of the rail for peers.
func (r *rail) address() railAddress {
	a := railAddress{gid: r.info.GID, ethernet: r.port.Ethernet(),
		rate: uint32(r.port.Rate * 8 / 1e6)}
	if r.gid.Subnet.IsValid() {
		a.bits = uint8(r.gid.Subnet.Bits())
	}
	return a
}

// openRails opens the ports of Config.Devices, or every active port, but at most Config.Rails. With
// a list, it fails if an entry has no port that opens; without one, if no port opens at all.
func (b *Backend) openRails(list []wanted) error {
	all := b.cfg.sysfs.devices()
	named := len(list) > 0
	var there []string
	for i := range all {
		for j := range all[i].Ports {
			there = append(there, fmt.Sprintf("%s:%d (%s)", all[i].Name, all[i].Ports[j].Number,
				all[i].Ports[j].State))
		}
		if !named {
			list = append(list, wanted{device: all[i].Name, gid: -1})
		}
	}
	var refused error
	for _, w := range list {
		before, known := len(b.rails), !named
		var err error
		for i := range all {
			for j := range all[i].Ports {
				if d, p := &all[i], &all[i].Ports[j]; w.names(d, p) {
					known = true
					if len(b.rails) < b.cfg.Rails {
						err = errors.Join(err, b.openRail(d, p, w.gid))
					}
				}
			}
		}
		switch {
		case !known:
			return unavailable(fmt.Sprintf("there is no %v; there are: %s", w,
				strings.Join(there, ", ")), "choose Config.Devices among these")
		case len(b.rails) > before: // a second port of the device may be down
		case err != nil && named:
			return err
		default:
			refused = errors.Join(refused, err)
		}
	}
	var u *driver.UnavailableError
	switch {
	case len(b.rails) > 0:
		return nil
	case len(all) == 0:
		return unavailable("no RDMA device", softFix)
	case errors.As(refused, &u):
		return unavailable("no port can be used: "+u.Reason, u.Fix)
	}
	return unavailable(fmt.Sprintf("no port can be used: %v", refused), "")
}

func (b *Backend) openRail(d *Device, p *Port, gid int) error {
	name := fmt.Sprintf("%s:%d", d.Name, p.Number)
	if !p.Active() {
		return unavailable(fmt.Sprintf("%s is %s (%s)", name, p.State, p.Physical), linkFix(p))
	}
	g, _, err := chooseGID(p, gid)
	if err != nil {
		return unavailable(fmt.Sprintf("%s: %v", name, err), gidFix)
	}
	mtu, _ := b.cfg.mtu() // checked
	index, err := b.net.OpenRail(verbs.RailConfig{
		Device: d.Name, Port: p.Number, GID: g.Index, MTU: int(mtu),
		Timeout: int(b.cfg.timeoutExponent()),
		Retries: b.cfg.Retries, Level: b.cfg.Level, TrafficClass: b.cfg.TrafficClass,
		EntriesMax: b.cfg.Entries,
	})
	if err != nil {
		return err
	}
	info, err := b.net.Rail(index)
	if err != nil {
		return err
	}
	r := &rail{index: index, device: *d, port: *p, gid: g, info: info}
	r.up.Store(true)
	b.rails = append(b.rails, r)
	return nil
}

func linkFix(p *Port) string {
	if p.Ethernet() {
		return "bring its network device up: ip link set DEVICE up; then look at the cable " +
			"and the switch"
	}
	return "look at the cable, and whether a subnet manager runs"
}

const gidFix = "give its network device an address, or name a GID in Config.Devices"

const softFix = "modprobe the driver of the device; without one: modprobe rdma_rxe, rdma link " +
	"add rxe0 type rxe netdev eth0"

func unavailable(reason, fix string) error {
	return &driver.UnavailableError{Backend: "rdma", Reason: reason, Fix: fix}
}

// Explain implements driver.Peer.
func (p *peer) Explain(localKey, remoteKey uint32) string {
	if p.enter() != nil {
		if why := p.whyLost(); why != nil {
			return fmt.Sprintf("rdma: the peer is lost: %v", why)
		}
		return "rdma: the peer is gone"
	}
	defer p.gate.Exit()
	p.mu.Lock()
	i, known := p.imports[remoteKey]
	p.mu.Unlock()
	m := p.b.table.At(localKey)
	if !known || m == nil {
		return "rdma: unknown key"
	}
	states := p.mender.pairStates()
	preferred := p.b.nearestTo(&m.span)
	var pairs []string
	for index, pair := range p.pairs {
		r := p.b.rails[pair.ours]
		text := fmt.Sprintf("%v %v -> %v %v", r, netip.AddrFrom16(r.info.GID).Unmap(),
			p.owner.rails[pair.theirs].ip(), states[index])
		if i.pairs&(1<<index) == 0 {
			text += ", not for this memory of the peer's"
		}
		if why := m.pinned.whyNotPinned(pair.ours); why != "" {
			text += ", not for this memory: " + why
		}
		if preferred&(1<<pair.ours) == 0 {
			text += ", far from this memory"
		}
		pairs = append(pairs, text)
	}
	where := "another host"
	if p.owner.host == p.b.address.host {
		where = "this host"
	}
	return fmt.Sprintf("%s, RC over %d queue pairs: %s; at most %d bytes in a work request, more "+
		"than that is spread", where, len(pairs), strings.Join(pairs, ", "), p.b.cfg.Slice)
}

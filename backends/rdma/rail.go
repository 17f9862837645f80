// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
)

// rail is a port of a device that we opened.
type rail struct {
	index  int
	device Device
	port   Port
	gid    GID
	info   verbs.Rail
	up     atomic.Bool
	gone   atomic.Bool // with its device
}

// String is how Config.Devices spells it.
func (r *rail) String() string { return r.device.Name + ":" + strconv.Itoa(r.port.Number) }

// usable reports whether its port is up.
func (r *rail) usable() bool { return r.up.Load() && !r.gone.Load() }

// address is what peers know of it.
func (r *rail) address() railAddress {
	a := railAddress{gid: r.info.GID, ethernet: r.port.Ethernet(),
		rate: uint32(r.port.Rate * 8 / 1e6)}
	if r.gid.Subnet.IsValid() {
		a.bits = uint8(r.gid.Subnet.Bits())
	}
	return a
}

// Rail is what a Backend says of one of its rails.
type Rail struct {
	Name    string  // as Config.Devices spells it
	GID     GID     // that it was opened with
	Node    int     // of NUMA; -1: not known
	Rate    float64 // bytes a second that the port is made for; 0: not known
	Up      bool    // false: its port is down, or its device is gone
	SGEMax  int     // local pieces in one work request
	Pairs   int     // of connections to other backends
	Counted verbs.Counters
}

// Rails says what became of each rail since it was opened. It may be called by any
// goroutine; after Close there are none.
func (b *Backend) Rails() []Rail {
	if !b.gate.Enter() {
		return nil
	}
	defer b.gate.Exit()
	list := make([]Rail, 0, len(b.rails))
	pairs := b.pairsByRail()
	for i, r := range b.rails {
		counted, _ := b.net.Counters(i) // of a rail that is there
		list = append(list, Rail{
			Name: r.String(), GID: r.gid, Node: r.device.Node, Rate: r.port.Rate, Up: r.usable(),
			SGEMax: r.info.SGEMax, Pairs: pairs[i], Counted: counted,
		})
	}
	return list
}

func (b *Backend) pairsByRail() []int {
	n := make([]int, len(b.rails))
	b.mu.Lock()
	defer b.mu.Unlock()
	for p := range b.peers {
		for _, pair := range p.pairs {
			n[pair.ours]++
		}
	}
	return n
}

// openRails opens what Config.Devices names, or every active port. One that was named and
// does not open is an error; of the others it only takes one that does.
func (b *Backend) openRails(list []wanted) error {
	all := b.cfg.sysfs.devices(wanting(list))
	if len(list) == 0 {
		list = everyPort(all)
	}
	var refused []error
	for i := range list {
		opened, err := b.openWanted(all, &list[i])
		if err != nil && b.cfg.Devices != "" {
			return err
		}
		if err != nil {
			refused = append(refused, err)
		}
		if opened == 0 && err == nil {
			break // Config.Rails are open
		}
	}
	if len(b.rails) > 0 {
		return nil
	}
	return noRail(all, refused)
}

// wanting asks for the devices of a list; nil: for all.
func wanting(list []wanted) func(name string) bool {
	if len(list) == 0 {
		return nil
	}
	return func(name string) bool {
		return slices.ContainsFunc(list, func(w wanted) bool { return w.device == name })
	}
}

// portsOf lists what there is.
func portsOf(all []Device) string {
	var names []string
	for i := range all {
		for j := range all[i].Ports {
			names = append(names, fmt.Sprintf("%s:%d (%s)", all[i].Name, all[i].Ports[j].Number,
				all[i].Ports[j].State))
		}
	}
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}

func everyPort(all []Device) (list []wanted) {
	for i := range all {
		list = append(list, wanted{device: all[i].Name, gid: -1})
	}
	return list
}

// openWanted opens the ports that an entry of Config.Devices means.
func (b *Backend) openWanted(all []Device, w *wanted) (opened int, err error) {
	known := false
	for i := range all {
		for j := range all[i].Ports {
			d, p := &all[i], &all[i].Ports[j]
			if !w.names(d, p) || len(b.rails) == b.cfg.Rails {
				known = known || w.names(d, p)
				continue
			}
			known = true
			if e := b.openRail(d, p, w.gid); e != nil {
				err = errors.Join(err, e)
				continue
			}
			opened++
		}
	}
	switch {
	case !known:
		return 0, unavailable(fmt.Sprintf("there is no %v; there are %s", w,
			portsOf(b.cfg.sysfs.devices(nil))), "choose Config.Devices among these")
	case opened > 0:
		return opened, nil // a device with a second port that is down
	}
	return 0, err
}

func (b *Backend) openRail(d *Device, p *Port, gid int) error {
	name := fmt.Sprintf("%s:%d", d.Name, p.Number)
	if !p.Active() {
		return unavailable(fmt.Sprintf("%s is %s (%s)", name, p.State, p.Physical), linkFix(p))
	}
	g, _, err := chooseGID(p, gid)
	if err != nil {
		return unavailable(fmt.Sprintf("%s: %v", name, err), "give its network device an "+
			"address, or name a GID in Config.Devices")
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

const softFix = "modprobe the driver of the device; without one: modprobe rdma_rxe, rdma link " +
	"add rxe0 type rxe netdev eth0"

// noRail says why not one port could be opened.
func noRail(all []Device, refused []error) error {
	if len(all) == 0 {
		return unavailable("no RDMA device", softFix)
	}
	reason, fix := fmt.Sprintf("no port of %d devices can be used", len(all)), ""
	for _, err := range refused {
		var u *driver.UnavailableError
		if errors.As(err, &u) {
			reason, fix = reason+": "+u.Reason, u.Fix
		} else {
			reason += ": " + err.Error()
		}
	}
	return unavailable(reason, fix)
}

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
	states := p.mender.look()
	preferred := p.b.prefers(&m.span)
	var pairs []string
	for index, pair := range p.pairs {
		r := p.b.rails[pair.ours]
		text := fmt.Sprintf("%v %v -> %v %v", r, netip.AddrFrom16(r.info.GID).Unmap(),
			p.owner.rails[pair.theirs].ip(), states[index])
		if counted, err := p.b.net.Counters(pair.ours); err == nil && counted.Rate > 0 {
			text += fmt.Sprintf(" %.1f GB/s", float64(counted.Rate)/1e9)
		}
		if i.pairs&(1<<index) == 0 {
			text += ", not for this memory of the peer's"
		}
		if why := m.pinned.leftOut(pair.ours); why != "" {
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

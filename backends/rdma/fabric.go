// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"time"

	"github.com/sluicehq/sluice/csrc"
	"github.com/sluicehq/sluice/driver"
)

// fabric is what this package needs of a csrc.VerbsContext, where each method is
// described. Tests put another one in its place.
type fabric interface {
	Close() error
	Poll(done []csrc.Done) int
	Drive()
	Arm() bool
	Receive() (csrc.VerbsNote, bool)
	Count(counter uint32) uint64
	AwaitCount(counter uint32, n uint64) bool
	News() (csrc.VerbsNews, bool)
	OpenRail(csrc.VerbsRailConfig) (int, error)
	Rail(rail int) (csrc.VerbsRail, error)
	Counters(rail int) (csrc.VerbsCounters, error)
	RailUp(rail int, up bool)
	Unmap(key uint32) error
	Grant(key uint32, rail int, flags uint32) (remoteKey uint32, err error)
	Revoke(key uint32) error
	pin(rail int, mem []byte, flags uint32) (pin, error)
	pinDevice(rail int, d csrc.VerbsDevice, flags uint32) (pin, error)
	show(key uint32, mem []byte, pins []pin, prefer uint32) error // VerbsContext.Map
	showDevice(key uint32, addr, n uint64, pins []pin, prefer uint32) error
	connect(initiator bool, credit int) (link, error)
}

// link is a csrc.VerbsConn.
type link interface {
	ID() uint64
	LaneMake(lane, rail int) (csrc.VerbsEnd, error)
	LaneBegin(lane int, theirs csrc.VerbsEnd) error
	LaneEnd(lane int) error
	LaneSettle(lane int, seen uint64) error
	Seen() uint64
	Import(m csrc.VerbsImport) (slot uint32, err error)
	Drop(slot uint32)
	Expire(slot uint32)
	Submit(tag uint64, b *driver.Batch) error
	Cancel(tag uint64)
	Drain(grace time.Duration) error
	End(status int32)
	Close()
}

// pin is a csrc.VerbsPin.
type pin interface{ Close() error }

var _ link = (*csrc.VerbsConn)(nil)

// opener makes a fabric: openVerbs but in tests.
type opener func(csrc.VerbsConfig) (fabric, error)

func openVerbs(c csrc.VerbsConfig) (fabric, error) {
	v, err := csrc.OpenVerbs(c)
	if err != nil {
		return nil, err
	}
	return verbsFabric{v}, nil
}

// verbsFabric is a context of verbs.
type verbsFabric struct{ *csrc.VerbsContext }

func (f verbsFabric) pin(rail int, mem []byte, flags uint32) (pin, error) {
	p, err := f.Pin(rail, mem, flags)
	if err != nil {
		return nil, err
	}
	return p, nil
}

func (f verbsFabric) pinDevice(rail int, d csrc.VerbsDevice, flags uint32) (pin, error) {
	p, err := f.PinDevice(rail, d, flags)
	if err != nil {
		return nil, err
	}
	return p, nil
}

func (f verbsFabric) show(key uint32, mem []byte, pins []pin, prefer uint32) error {
	return f.Map(key, mem, verbsPins(pins), prefer)
}

func (f verbsFabric) showDevice(key uint32, addr, n uint64, pins []pin, prefer uint32) error {
	return f.MapDevice(key, addr, n, verbsPins(pins), prefer)
}

func verbsPins(pins []pin) []*csrc.VerbsPin {
	list := make([]*csrc.VerbsPin, len(pins))
	for i, p := range pins {
		list[i], _ = p.(*csrc.VerbsPin) // nil stays nil
	}
	return list
}

func (f verbsFabric) connect(initiator bool, credit int) (link, error) {
	n, err := f.Connect(initiator, credit)
	if err != nil {
		return nil, err
	}
	return n, nil
}

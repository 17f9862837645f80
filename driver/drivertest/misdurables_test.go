// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
)

// persistent is mem that says when bytes would survive a loss of power: memory stands for what
// a disk has once it was told to sync. What is nil stays good.
type persistent struct {
	*mem.Backend
	submit func(p driver.Peer, tag uint64, b *driver.Batch) error
	sync   func(b *persistent) // when the bytes of a durable write have arrived
	first  func(b *persistent) // before it is submitted

	begun, ended func()

	mu      sync.Mutex
	durable map[uint64]bool // tags under way
}

type persistentPeer struct {
	driver.Peer
	b *persistent
}

func (b *persistent) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	p, err := b.Backend.Connect(ctx, addr)
	if err != nil {
		return nil, err
	}
	return &persistentPeer{p, b}, nil
}

func (p *persistentPeer) Can() driver.Can { return p.Peer.Can() | driver.CanDurable }

func (p *persistentPeer) Submit(tag uint64, b *driver.Batch) error {
	if !b.Durable || b.Check(p.Can()) != nil {
		return p.Peer.Submit(tag, b)
	}
	by := p.b
	by.mu.Lock()
	by.durable[tag] = true
	by.mu.Unlock()
	if by.first != nil {
		by.first(by)
	}
	c := copied(b)
	c.Durable = false
	submit := driver.Peer.Submit
	if by.submit != nil {
		submit = by.submit
	}
	err := submit(p.Peer, tag, &c)
	if err != nil {
		by.mu.Lock()
		delete(by.durable, tag)
		by.mu.Unlock()
	}
	return err
}

// wholeSync begins and ends.
func wholeSync(b *persistent) {
	if b.begun != nil {
		b.begun()
		b.ended()
	}
}

// Poll syncs before it tells of a durable write.
func (b *persistent) Poll(done []driver.Completion) (int, error) {
	n, err := b.Backend.Poll(done)
	for _, c := range done[:n] {
		b.mu.Lock()
		durable := b.durable[c.Tag]
		delete(b.durable, c.Tag)
		b.mu.Unlock()
		if durable && c.Err == nil {
			b.sync(b)
		}
	}
	return n, err
}

var misdurables = []struct {
	name   string
	checks []string
	how    persistent
}{
	{"never syncs", []string{"DurableWrites", "DurablePattern"},
		persistent{sync: func(*persistent) {}}},
	{"syncs before the bytes are there", []string{"DurableWrites", "DurablePattern"},
		persistent{first: wholeSync, sync: func(*persistent) {}}},
	{"does not wait for the end of a sync", []string{"DurableWrites", "DurablePattern"},
		persistent{sync: func(b *persistent) {
			if b.begun != nil {
				b.begun()
				time.AfterFunc(20*time.Millisecond, b.ended)
			}
		}}},
	{"syncs every other time", []string{"DurablePattern"},
		persistent{sync: func() func(*persistent) {
			count := 0
			return func(b *persistent) {
				if count++; count%2 == 0 {
					wholeSync(b)
				}
			}
		}()}},
	{"writes the first entry alone", []string{"DurablePattern"}, persistent{sync: wholeSync,
		submit: func(p driver.Peer, tag uint64, b *driver.Batch) error {
			if b.Pattern != nil {
				first := *b.Pattern
				first.Count, first.Remote.List = 1, first.Remote.List[:1]
				b.Pattern = &first
			}
			return p.Submit(tag, b)
		}}},
	{"clamps what is out of bounds", []string{"DurableBounds"}, persistent{sync: wholeSync,
		submit: func(p driver.Peer, tag uint64, b *driver.Batch) error {
			if err := p.Submit(tag, b); err == nil {
				return nil
			}
			return p.Submit(tag, empty())
		}}},
	{"allocates", []string{"DurableNoAllocation"}, persistent{sync: wholeSync,
		submit: func(p driver.Peer, tag uint64, b *driver.Batch) error {
			return p.Submit(tag, changed(b, func(*driver.Desc) {}))
		}}},
}

// persistentHarness is of a backend that is one of misdurables, or a good one.
func persistentHarness(how *persistent) Harness {
	h := sabotaged(sabotage{})
	h.New = func() (driver.Backend, error) {
		b, err := mem.New(mem.Config{BatchesMax: 64})
		if err != nil {
			return nil, err
		}
		return &persistent{Backend: b, submit: how.submit, sync: how.sync, first: how.first,
			durable: map[uint64]bool{}}, nil
	}
	h.Syncs = func(b driver.Backend, begun, ended func()) {
		p := b.(*persistent)
		p.begun, p.ended = begun, ended
	}
	return h
}

// TestMisdurables proves that the checks of durable writes can fail.
func TestMisdurables(t *testing.T) {
	if raceEnabled {
		t.Log("not run with the race detector, which notices first")
		return
	}
	for i := range misdurables {
		m := &misdurables[i]
		t.Run(m.name, func(t *testing.T) {
			for _, name := range m.checks {
				notices(t, find(t, name), persistentHarness(&m.how), Self)
			}
		})
	}
}

// TestGoodDurables proves that the stand-in alone is no misdeed.
func TestGoodDurables(t *testing.T) {
	h := persistentHarness(&persistent{sync: wholeSync}).withDefaults()
	h.Limit = 10 * time.Second
	for _, c := range durableChecks {
		if c.name != "DurableNoAllocation" { // the stand-in keeps a map
			t.Run(c.name, func(t *testing.T) { c.perform(t, h, Self) })
		}
	}
}

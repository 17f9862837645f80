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
	submit func(p countingPeer, tag uint64, descs []driver.Desc, pages *driver.Pages) error
	sync   func(b *persistent) // when the bytes of a durable write have arrived
	first  func(b *persistent) // before it is submitted

	begun, ended func()

	mu      sync.Mutex
	durable map[uint64]bool // tags under way
}

type persistentPeer struct {
	countingPeer
	b *persistent
}

func (b *persistent) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	p, err := b.Backend.Connect(ctx, addr)
	if err != nil {
		return nil, err
	}
	return &persistentPeer{p.(countingPeer), b}, nil
}

func (p *persistentPeer) SubmitDurable(tag uint64, descs []driver.Desc, pages *driver.Pages) error {
	b := p.b
	b.mu.Lock()
	b.durable[tag] = true
	b.mu.Unlock()
	if b.first != nil {
		b.first(b)
	}
	var err error
	switch {
	case b.submit != nil:
		err = b.submit(p.countingPeer, tag, descs, pages)
	case pages != nil:
		err = p.SubmitPages(driver.Write, tag, pages, nil)
	default:
		err = p.Submit(driver.Write, tag, descs)
	}
	if err != nil {
		b.mu.Lock()
		delete(b.durable, tag)
		b.mu.Unlock()
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
	{"never syncs", []string{"DurableWrites", "DurablePages"}, persistent{sync: func(*persistent) {}}},
	{"syncs before the bytes are there", []string{"DurableWrites", "DurablePages"}, persistent{first: wholeSync, sync: func(*persistent) {}}},
	{"does not wait for the end of a sync", []string{"DurableWrites", "DurablePages"}, persistent{sync: func(b *persistent) {
		if b.begun != nil {
			b.begun()
			time.AfterFunc(20*time.Millisecond, b.ended)
		}
	}}},
	{"syncs every other time", []string{"DurablePages"}, persistent{sync: func() func(*persistent) {
		count := 0
		return func(b *persistent) {
			if count++; count%2 == 0 {
				wholeSync(b)
			}
		}
	}()}},
	{"writes the first entry alone", []string{"DurablePages"}, persistent{sync: wholeSync,
		submit: func(p countingPeer, tag uint64, descs []driver.Desc, pages *driver.Pages) error {
			if pages != nil {
				return p.Submit(driver.Write, tag, []driver.Desc{pages.Desc(0)})
			}
			return p.Submit(driver.Write, tag, descs)
		}}},
	{"clamps what is out of bounds", []string{"DurableBounds"}, persistent{sync: wholeSync,
		submit: func(p countingPeer, tag uint64, descs []driver.Desc, pages *driver.Pages) error {
			if err := p.Submit(driver.Write, tag, descs); err == nil {
				return nil
			}
			return p.SubmitNotify(driver.Write, tag, nil, []byte{})
		}}},
	{"allocates", []string{"DurableNoAllocation"}, persistent{sync: wholeSync,
		submit: func(p countingPeer, tag uint64, descs []driver.Desc, pages *driver.Pages) error {
			return p.Submit(driver.Write, tag, append([]driver.Desc(nil), descs...))
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
		return &persistent{Backend: b, submit: how.submit, sync: how.sync, first: how.first, durable: map[uint64]bool{}}, nil
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

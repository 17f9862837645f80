// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"context"
	"testing"
	"time"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
)

// miscounter is mem, but for how it counts. What is nil stays good.
type miscounter struct {
	*mem.Backend
	submit func(p countingPeer, tag uint64, descs []driver.Desc, pages *driver.Pages, counter uint32) error
	await  func(b *mem.Backend, counter uint32, n uint64) bool
}

// countingPeer is a peer of mem.
type countingPeer interface {
	fullPeer
	driver.Counter
	driver.Watcher
}

type miscountingPeer struct {
	countingPeer
	b *miscounter
}

func (b *miscounter) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	p, err := b.Backend.Connect(ctx, addr)
	if err != nil {
		return nil, err
	}
	return &miscountingPeer{p.(countingPeer), b}, nil
}

func (p *miscountingPeer) SubmitCount(tag uint64, descs []driver.Desc, pages *driver.Pages, counter uint32) error {
	if p.b.submit == nil {
		return p.countingPeer.SubmitCount(tag, descs, pages, counter)
	}
	return p.b.submit(p.countingPeer, tag, descs, pages, counter)
}

func (b *miscounter) AwaitCount(counter uint32, n uint64) bool {
	if b.await == nil {
		return b.Backend.AwaitCount(counter, n)
	}
	return b.await(b.Backend, counter, n)
}

var miscounts = []struct {
	name   string
	checks []string
	how    miscounter
}{
	{"counts first and moves later", []string{"CountAfterData", "CountPages", "CountOfFailedBatch"}, miscounter{
		submit: func(p countingPeer, tag uint64, descs []driver.Desc, pages *driver.Pages, counter uint32) error {
			if counter >= driver.CountersMax {
				return driver.ErrBounds
			}
			if err := p.SubmitCount(1<<63|tag, nil, nil, counter); err != nil {
				return err
			}
			time.Sleep(time.Millisecond)
			if pages != nil {
				return p.SubmitPages(driver.Write, tag, pages, nil)
			}
			return p.SubmitNotify(driver.Write, tag, descs, []byte{})
		},
	}},
	{"counts on another counter", []string{"CountAfterData", "CountUnattended", "CountAmongMessages"}, miscounter{
		submit: func(p countingPeer, tag uint64, descs []driver.Desc, pages *driver.Pages, counter uint32) error {
			return p.SubmitCount(tag, descs, pages, counter&^1)
		},
	}},
	{"moves and does not count", []string{"CountAfterData", "CountPages", "CountUnattended", "CountWakes", "CountBounds"}, miscounter{
		submit: func(p countingPeer, tag uint64, descs []driver.Desc, pages *driver.Pages, counter uint32) error {
			if pages != nil {
				return p.SubmitPages(driver.Write, tag, pages, nil)
			}
			return p.SubmitNotify(driver.Write, tag, descs, []byte{})
		},
	}},
	{"takes every counter", []string{"CountBounds"}, miscounter{
		submit: func(p countingPeer, tag uint64, descs []driver.Desc, pages *driver.Pages, counter uint32) error {
			return p.SubmitCount(tag, descs, pages, counter%driver.CountersMax)
		},
	}},
	{"wakes for each count", []string{"CountWakes"}, miscounter{
		await: func(b *mem.Backend, counter uint32, n uint64) bool {
			b.AwaitCount(counter, 1)
			return b.Count(counter) >= n
		},
	}},
	{"wakes nobody", []string{"CountWakes"}, miscounter{
		await: func(b *mem.Backend, counter uint32, n uint64) bool { return b.Count(counter) >= n },
	}},
	{"says that every count is reached", []string{"CountBounds"}, miscounter{
		await: func(*mem.Backend, uint32, uint64) bool { return true },
	}},
}

// TestMiscounts proves that the checks of counts can fail.
func TestMiscounts(t *testing.T) {
	if raceEnabled {
		t.Log("not run with the race detector, which notices first")
		return
	}
	for _, m := range miscounts {
		t.Run(m.name, func(t *testing.T) {
			h := sabotaged(sabotage{})
			h.New = func() (driver.Backend, error) {
				b, err := mem.New(mem.Config{BatchesMax: 64})
				if err != nil {
					return nil, err
				}
				how := m.how
				how.Backend = b
				return &how, nil
			}
			for _, name := range m.checks {
				notices(t, find(t, name), h, Pair)
			}
		})
	}
}

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
	submit func(p driver.Peer, tag uint64, b *driver.Batch) error // with a count
	await  func(b *mem.Backend, counter uint32, n uint64) bool
}

type miscountingPeer struct {
	driver.Peer
	b *miscounter
}

func (b *miscounter) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	p, err := b.Backend.Connect(ctx, addr)
	if err != nil {
		return nil, err
	}
	return &miscountingPeer{p, b}, nil
}

func (p *miscountingPeer) Submit(tag uint64, b *driver.Batch) error {
	if p.b.submit == nil || b.Tail != driver.CountTail {
		return p.Peer.Submit(tag, b)
	}
	return p.b.submit(p.Peer, tag, b)
}

func (b *miscounter) AwaitCount(counter uint32, n uint64) bool {
	if b.await == nil {
		return b.Backend.AwaitCount(counter, n)
	}
	return b.await(b.Backend, counter, n)
}

// uncounted is a batch with an empty message in place of its count.
func uncounted(b *driver.Batch) *driver.Batch {
	c := copied(b)
	c.Tail = driver.NotifyTail
	return &c
}

var miscounts = []struct {
	name   string
	checks []string
	how    miscounter
}{
	{"counts first and moves later", []string{"CountAfterData", "CountPattern",
		"CountOfFailedBatch"}, miscounter{
		submit: func(p driver.Peer, tag uint64, b *driver.Batch) error {
			if b.Counter >= driver.CountersMax {
				return driver.ErrBounds
			}
			if err := p.Submit(1<<63|tag, tailOf(b)); err != nil {
				return err
			}
			time.Sleep(time.Millisecond)
			return p.Submit(tag, uncounted(b))
		},
	}},
	{"counts on another counter", []string{"CountAfterData", "CountUnattended",
		"CountAmongMessages"}, miscounter{
		submit: func(p driver.Peer, tag uint64, b *driver.Batch) error {
			c := copied(b)
			c.Counter &^= 1
			return p.Submit(tag, &c)
		},
	}},
	{"moves and does not count", []string{"CountAfterData", "CountPattern", "CountUnattended",
		"CountWakes", "CountBounds"}, miscounter{
		submit: func(p driver.Peer, tag uint64, b *driver.Batch) error {
			return p.Submit(tag, uncounted(b))
		},
	}},
	{"takes every counter", []string{"CountBounds"}, miscounter{
		submit: func(p driver.Peer, tag uint64, b *driver.Batch) error {
			c := copied(b)
			c.Counter %= driver.CountersMax
			return p.Submit(tag, &c)
		},
	}},
	{"wakes for each count", []string{"CountWakes"}, miscounter{
		await: func(b *mem.Backend, counter uint32, n uint64) bool {
			b.AwaitCount(counter, 1)
			return b.Count(counter) >= n
		},
	}},
	{"never wakes", []string{"CountWakes"}, miscounter{
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

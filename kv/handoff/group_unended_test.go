// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/kv/layout"
)

// reluctant is a backend that begins transfers of bytes only once it is let, and ends none before,
// as a device that does not answer.
type reluctant struct {
	*mem.Backend

	mu    sync.Mutex
	holds bool
	held  []func()
}

type reluctantPeer struct {
	driver.Peer
	b *reluctant
}

func (b *reluctant) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	p, err := b.Backend.Connect(ctx, addr)
	if err != nil {
		return nil, err
	}
	return &reluctantPeer{p, b}, nil
}

// wait has f called later, if anything is held back; always: in any case.
func (b *reluctant) wait(always bool, f func()) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.holds || !always && len(b.held) == 0 {
		return false
	}
	b.held = append(b.held, f)
	return true
}

// hold holds back what comes; let goes on with it.
func (b *reluctant) hold() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.holds = true
}

func (b *reluctant) let() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, f := range b.held {
		f()
	}
	b.holds, b.held = false, nil
}

func (b *reluctant) count() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.held)
}

func (p *reluctantPeer) Submit(tag uint64, batch *driver.Batch) error {
	later := *batch
	if batch.Pattern != nil || len(batch.Descs) > 0 {
		if batch.Pattern != nil {
			pattern := *batch.Pattern
			later.Pattern = &pattern
		}
		if p.b.wait(true, func() { _ = p.Peer.Submit(tag, &later) }) {
			return nil
		}
	}
	return p.Peer.Submit(tag, batch)
}

func (p *reluctantPeer) Cancel(tag uint64) {
	if !p.b.wait(false, func() {}) {
		p.Peer.Cancel(tag)
	}
}

func (p *reluctantPeer) Close() error {
	if p.b.wait(false, func() { _ = p.Peer.Close() }) {
		return nil
	}
	return p.Peer.Close()
}

// withReluctant opens a crowd over such backends, and returns them, by rank, senders first.
func withReluctant(t *testing.T, pull bool) (*crowd, []*reluctant) {
	var list []*reluctant
	s := fourToTwo(t, func(t testing.TB) driver.Backend {
		b := &reluctant{Backend: newMem(t).(*mem.Backend)}
		list = append(list, b)
		return b
	}, pull)
	s.engine = func(c *engine.Config) { c.AbortGrace = 50 * time.Millisecond }
	return newCrowd(t, s), list
}

// TestGroupReadsThatDoNotEnd: a receiver whose backend cannot end a read has no proof, and must not
// say that nothing lands in its blocks any more.
func TestGroupReadsThatDoNotEnd(t *testing.T) { testkit.InVirtualTime(t, groupReadsThatDoNotEnd) }

func groupReadsThatDoNotEnd(t *testing.T) {
	c, backends := withReluctant(t, true)
	j := c.newJob(t, layout.Span{To: 40})
	j.begin(t)
	slow := backends[len(c.from)]
	slow.hold()
	require.NoError(t, j.pushes[0].Layer(within(t), 0))
	await(t, "a read", func() bool { return slow.count() > 0 })
	err := j.requests[0].Cancel(within(t))
	<-j.requests[0].Done()
	slow.let()
	c.leaves()
	require.ErrorIs(t, err, ErrInUse)
	require.ErrorIs(t, j.requests[0].Err(), engine.ErrUnproven)
}

// TestGroupWritesThatDoNotEnd is that for a sender: its blocks are still read.
func TestGroupWritesThatDoNotEnd(t *testing.T) { testkit.InVirtualTime(t, groupWritesThatDoNotEnd) }

func groupWritesThatDoNotEnd(t *testing.T) {
	c, backends := withReluctant(t, false)
	j := c.newJob(t, layout.Span{To: 40})
	j.begin(t)
	slow := backends[0]
	slow.hold()
	require.NoError(t, j.pushes[0].Layer(within(t), 0))
	await(t, "a write", func() bool { return slow.count() > 0 })
	err := j.pushes[0].Abort(within(t))
	slow.let()
	c.leaves()
	require.ErrorIs(t, err, ErrInUse)
	require.ErrorIs(t, err, engine.ErrUnproven)
}

// leaves has the crowd close without a look at errors: what did not end stays listed.
func (c *crowd) leaves() {
	for _, m := range c.from {
		m.closed = true
	}
	for _, m := range c.to {
		m.closed = true
	}
}

// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/kv/layout"
)

// doubtful is mem whose batches of bytes end without proof once it is told so, as those of a chain
// do whose connection is lost while the peer has pieces in hand.
type doubtful struct {
	*mem.Backend
	mu    sync.Mutex
	doubt bool
	done  []driver.Completion
}

type doubtfulPeer struct {
	driver.Peer
	b *doubtful
}

func (b *doubtful) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	p, err := b.Backend.Connect(ctx, addr)
	return &doubtfulPeer{p, b}, err
}

func (p *doubtfulPeer) Submit(tag uint64, batch *driver.Batch) error {
	p.b.mu.Lock()
	defer p.b.mu.Unlock()
	if !p.b.doubt || len(batch.Descs) == 0 && batch.Pattern == nil {
		return p.Peer.Submit(tag, batch)
	}
	p.b.done = append(p.b.done, driver.Completion{Tag: tag, Err: fmt.Errorf("no answer: %w: %w",
		driver.ErrUnproven, driver.ErrPeerLost)})
	return nil
}

func (b *doubtful) Poll(done []driver.Completion) (int, error) {
	b.mu.Lock()
	n := copy(done, b.done)
	b.done = b.done[n:]
	b.mu.Unlock()
	if n > 0 {
		return n, nil
	}
	return b.Backend.Poll(done)
}

// stubborn is a backend that cannot prove anything for a while.
type stubborn struct {
	*mem.Backend
	fails *atomic.Int64
}

type stubbornMemory struct {
	driver.Memory
	fails *atomic.Int64
}

func (b stubborn) Register(seg driver.Segment) (driver.Memory, error) {
	m, err := b.Backend.Register(seg)
	return stubbornMemory{m, b.fails}, err
}

func (m stubbornMemory) Revoke(ctx context.Context) error {
	if m.fails.Add(-1) >= 0 {
		return context.DeadlineExceeded
	}
	return m.Memory.Revoke(ctx)
}

// atOnce is how long a test waits for what must not happen.
const atOnce = 100 * time.Millisecond

// counted is a backend that tells of each import and each drop before it makes it.
type counted struct {
	driver.Backend
	imports, drops func()
}

type countedPeer struct {
	driver.Peer
	c counted
}

func (c counted) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	p, err := c.Backend.Connect(ctx, addr)
	return countedPeer{p, c}, err
}

func (p countedPeer) Import(token []byte) (uint32, uint64, error) {
	p.c.imports()
	return p.Peer.Import(token)
}

func (p countedPeer) Drop(key uint32) {
	p.c.drops()
	p.Peer.Drop(key)
}

// leasedByLayer is a request from one rank to one other, which has a lease for each of its layers.
func leasedByLayer(t *testing.T, layers int, backend func(testing.TB) driver.Backend) *job {
	t.Helper()
	spec := grouped(layers, 4, 16)
	c := newCrowd(t, crowdSetup{from: sidesOf(t, spec, layout.Placement{BlockTokens: 4}),
		to: sidesOf(t, spec, layout.Placement{BlockTokens: 4}), backend: backend,
		config: func(_ bool, g *GroupConfig) {
			g.Edge = func(e *layout.Edge) { e.Op = engine.Write }
		}})
	c.to[0].receive.rangesMax = 1
	return c.newJob(t, layout.Span{To: 40})
}

// TestGroupLayerBesideTheEnd: a push has not ended while a call of Layer is under way, which would
// import anew what was closed.
func TestGroupLayerBesideTheEnd(t *testing.T) { testkit.InVirtualTime(t, groupLayerBesideTheEnd) }

func groupLayerBesideTheEnd(t *testing.T) {
	var imports atomic.Int64
	j := leasedByLayer(t, 1, func(t testing.TB) driver.Backend {
		return counted{newMem(t), func() { imports.Add(1) }, func() { imports.Add(-1) }}
	})
	j.begin(t)
	push := j.pushes[0]
	push.window <- struct{}{} // as Layer does, before it lists anything
	over, cancel := context.WithCancel(context.Background())
	cancel()
	_ = push.Abort(over)
	select {
	case <-push.Ended():
		t.Error("a push has ended beside a call of Layer")
	case <-time.After(atOnce):
	}
	require.ErrorIs(t, push.post(&groupFlight{}, nil), engine.ErrAborted)
	j.awaitEnd(t)
	require.EqualValues(t, 1, imports.Load(), "the one that is kept")
}

// TestGroupEndsBetweenImports: the context of Begin, or the receiver, ends a request while a lease
// is imported. The push has not ended before that is over: all imports are given back but the one
// that is kept.
func TestGroupEndsBetweenImports(t *testing.T) {
	for want, end := range map[error]func(*job, context.CancelFunc){
		context.Canceled: func(_ *job, cancel context.CancelFunc) { cancel() },
		ErrCancelled: func(j *job, _ context.CancelFunc) {
			j.requests[0].fail(&EndError{Reason: Cancelled})
		},
	} {
		testkit.RunInVirtualTime(t, want.Error(), func(t *testing.T) {
			ctx, cancel := context.WithCancel(within(t))
			imports, standing := 0, 0
			var j *job
			j = leasedByLayer(t, 8, func(t testing.TB) driver.Backend {
				return counted{newMem(t), func() {
					standing++
					if imports++; imports == 3 {
						end(j, cancel)
						time.Sleep(time.Second) // until all others have done what they can
					}
				}, func() { standing-- }}
			})
			j.open(t)
			_, err := j.c.from[0].sender.Begin(ctx, j.number, j.from[0], j.span)
			require.ErrorIs(t, err, want)
			j.awaitEnd(t)
			if errors.Is(want, ErrCancelled) {
				standing-- // the third one has failed
			}
			require.Equal(t, []int{3, 1}, []int{imports, standing})
		})
	}
}

// TestGroupCloseWaitsForWhatIsLeft closes a GroupSender while a push gives back what it holds.
func TestGroupCloseWaitsForWhatIsLeft(t *testing.T) {
	testkit.InVirtualTime(t, groupCloseWaitsForWhatIsLeft)
}

func groupCloseWaitsForWhatIsLeft(t *testing.T) {
	dropping, goOn := make(chan struct{}), make(chan struct{})
	var first sync.Once
	j := leasedByLayer(t, 3, func(t testing.TB) driver.Backend {
		return counted{newMem(t), func() {}, func() {
			first.Do(func() {
				close(dropping)
				<-goOn
			})
		}}
	})
	j.begin(t)
	go j.pushes[0].Abort(within(t))
	<-dropping
	closed := make(chan error, 1)
	go func() { closed <- j.c.from[0].sender.Close() }()
	select {
	case err := <-closed:
		t.Errorf("Close has not waited for a push: %v", err)
	case <-time.After(atOnce):
	}
	close(goOn)
	j.awaitEnd(t)
	if !t.Failed() {
		require.NoError(t, <-closed)
	}
}

// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/internal/wire"
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

// TestWhatWasNotAcceptedCounts: a peer that begins and ends requests leaves places to others.
func TestWhatWasNotAcceptedCounts(t *testing.T) {
	s := setup{blocks: 8, receiver: func(c *ReceiverConfig) { c.RequestsMax = 4 }}
	p := newPair(t, s)
	s.model, s.backend = small, newMem
	other := newSide(t, "other", s, layout.Options{Blocks: prefillBlocks})
	other.peer = connect(t, other.eng, p.decode.eng)
	connect(t, p.decode.eng, other.eng)
	sender, err := NewSender(other.mux, SenderConfig{Region: other.region,
		Geometry: other.geometry})
	require.NoError(t, err)
	defer sender.Close()
	for i := range uint64(4) {
		push, err := p.sender.Begin(within(t), p.prefill.peer, i+1, p.request(t, i+1))
		if i == 3 {
			require.ErrorIs(t, err, ErrRefused) // it has three quarters
			continue
		}
		require.NoError(t, err)
		require.NoError(t, push.Abort(within(t)))
		for ended := false; !ended; runtime.Gosched() {
			p.receiver.mu.Lock()
			ended = len(p.receiver.requests) == 0
			p.receiver.mu.Unlock()
		}
	}
	push, err := sender.Begin(within(t), other.peer, 9, p.request(t, 9))
	require.NoError(t, err)
	require.NoError(t, push.Abort(within(t)))
	for range 4 {
		q, err := p.receiver.Accept(within(t))
		require.NoError(t, err)
		q.Release()
		<-q.Done()
	}
	p.handOver(t, 10, 3, 4).Release()
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

func newStubborn(t *testing.T) (p *pair, fails *atomic.Int64) {
	t.Helper()
	fails = new(atomic.Int64)
	return newPair(t, setup{backend: func(t testing.TB) driver.Backend {
		return stubborn{newMem(t).(*mem.Backend), fails}
	}, receiver: func(c *ReceiverConfig) { c.RevokeTimeout = 10 * time.Millisecond }}), fails
}

// TestBlocksThatCannotBeRevokedAreLost: without a proof, a block is not used
// again, and the pool says so; it has the block back once the engine has found the proof.
func TestBlocksThatCannotBeRevokedAreLost(t *testing.T) {
	testkit.InVirtualTime(t, blocksThatCannotBeRevokedAreLost)
}

func blocksThatCannotBeRevokedAreLost(t *testing.T) {
	p, fails := newStubborn(t)
	push, q := p.begin(t, 1, 1, 2, 3)
	fails.Store(1 << 40)
	require.ErrorIs(t, q.Cancel(within(t)), engine.ErrUnproven)
	<-push.Ended()
	if s := p.pool.Stats(); s.Retired != 3 || s.Used != 0 || p.receiver.Stats().Quarantined != 3 {
		t.Errorf("pool %+v, receiver %+v", s, p.receiver.Stats())
	}
	if !errors.Is(q.Err(), ErrCancelled) || !errors.Is(push.Err(), ErrCancelled) {
		t.Errorf("receiver: %v, sender: %v", q.Err(), push.Err())
	}
	fails.Store(0)
	p.handOver(t, 2, 4, 5).Release() // the others serve on
	time.Sleep(time.Minute)
	require.Zero(t, p.pool.Stats().Retired)
	require.Zero(t, p.decode.eng.Stats().Leases)
}

// TestRetiredBlocksOutliveTheReceiver: the pool itself waits for the proof, so that the next
// Receiver of it has the blocks.
func TestRetiredBlocksOutliveTheReceiver(t *testing.T) {
	testkit.InVirtualTime(t, retiredBlocksOutliveTheReceiver)
}

func retiredBlocksOutliveTheReceiver(t *testing.T) {
	p, fails := newStubborn(t)
	push, q := p.begin(t, 1, 1, 2, 3)
	fails.Store(1 << 40)
	require.ErrorIs(t, q.Cancel(within(t)), engine.ErrUnproven)
	<-push.Ended()
	require.NoError(t, p.receiver.Close())
	require.Equal(t, 3, p.pool.Stats().Retired)
	var err error
	p.receiver, err = NewReceiver(p.decode.mux, ReceiverConfig{Region: p.decode.region,
		Geometry: p.decode.geometry, Pool: p.pool})
	require.NoError(t, err)
	fails.Store(0)
	time.Sleep(time.Minute)
	require.Zero(t, p.pool.Stats().Retired)
	ids := make([]uint64, 16)
	for i := range ids {
		ids[i] = uint64(i)
	}
	p.handOver(t, 2, ids...).Release() // all of the pool
}

// coarse is mem as the cards of rdma are: they know a registration alone, so that whoever has its
// key reaches all of it, whichever ranges it was made for.
type coarse struct{ driver.Backend }

func (b coarse) Register(seg driver.Segment) (driver.Memory, error) {
	seg.Only = nil
	return b.Backend.Register(seg)
}

// TestLiarReachesItsBlocksAlone: a sender that takes no notice of the bounds of its leases, over a
// backend that knows registrations alone, writes to the blocks that it was granted and no others.
func TestLiarReachesItsBlocksAlone(t *testing.T) {
	p := newPair(t, setup{backend: func(t testing.TB) driver.Backend { return coarse{newMem(t)} }})
	between := p.handOver(t, 1, 7)
	defer between.Release()
	push, q := p.begin(t, 2, 1, 2, 3)
	before := bytes.Clone(p.decode.region.Bytes())
	tr, err := p.prefill.eng.NewTransfer(p.prefill.peer, engine.Write, engine.Route{})
	require.NoError(t, err)
	landed := 0
	for _, token := range push.links[0].there.tokens {
		d, err := wire.Decode(token.lease)
		require.NoError(t, err)
		d.Regions[0].Only = nil
		forged, err := wire.Encode(nil, d)
		require.NoError(t, err)
		remote, err := p.prefill.peer.Import(forged)
		require.NoError(t, err)
		for at := range d.Regions[0].Size / 64 {
			require.NoError(t, tr.Add(p.prefill.region, 0, remote, 64*at, 1))
			require.NoError(t, tr.Post())
			require.NoError(t, tr.Wait(within(t)))
			landed++
			require.NoError(t, tr.Reset())
		}
		require.NoError(t, remote.Close())
	}
	require.NoError(t, tr.Close())
	for _, block := range q.Blocks {
		copy(p.decode.block(block), before[uint64(block)*p.decode.geometry.Stride():])
	}
	require.True(t, bytes.Equal(before, p.decode.region.Bytes()), "a block of another request")
	require.Equal(t, 3*int(p.decode.geometry.BlockBytes())/64, landed)
	require.NoError(t, push.Abort(within(t)))
	<-q.Done()
	q.Release()
}

// atOnce is how long a test waits for what must not happen.
const atOnce = 100 * time.Millisecond

// TestLayerBesideTheEnd: a Push has not ended while a call of Layer is under way, which would
// import anew what was closed.
func TestLayerBesideTheEnd(t *testing.T) { testkit.InVirtualTime(t, layerBesideTheEnd) }

func layerBesideTheEnd(t *testing.T) {
	var imports atomic.Int64
	p := newPair(t, setup{backend: func(t testing.TB) driver.Backend {
		return counted{newMem(t), func() { imports.Add(1) }, func() { imports.Add(-1) }}
	}})
	push, q := p.begin(t, 1, 1, 2)
	push.window <- struct{}{} // as Layer does, before it lists anything
	over, cancel := context.WithCancel(context.Background())
	cancel()
	_ = push.Abort(over)
	select {
	case <-push.Ended():
		t.Error("a Push has ended beside a call of Layer")
	case <-time.After(atOnce):
	}
	require.ErrorIs(t, push.post(&groupFlight{}, nil), engine.ErrAborted)
	<-push.Ended()
	<-q.Done()
	require.EqualValues(t, 1, imports.Load(), "the one that is kept")
}

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

// TestGroupsOfLostPeers go with the connection: the next request over another makes one anew.
func TestGroupsOfLostPeers(t *testing.T) { over(t, groupsOfLostPeers) }

func groupsOfLostPeers(t *testing.T, open func(testing.TB) driver.Backend) {
	p := newPair(t, setup{backend: open})
	p.handOver(t, 1, 1, 2).Release()
	push, q := p.begin(t, 2, 3)
	require.NoError(t, p.prefill.peer.Close())
	<-push.Ended()
	require.ErrorIs(t, push.Err(), engine.ErrPeerLost)
	q.Release()
	await(t, "the group goes", func() bool {
		p.sender.peers.mu.Lock()
		defer p.sender.peers.mu.Unlock()
		return len(p.sender.peers.of) == 0
	})
	p.prefill.peer = connect(t, p.prefill.eng, p.decode.eng)
	<-q.Done()
	p.handOver(t, 3, 3).Release()
}

// TestCloseBetweenAnswerAndBegin: a Receiver that is closed tells a sender that knows what is
// missing and has not begun to hand it over, and one whose offer comes as it closes.
func TestCloseBetweenAnswerAndBegin(t *testing.T) {
	testkit.InVirtualTime(t, closeBetweenAnswerAndBegin)
}

func closeBetweenAnswerAndBegin(t *testing.T) {
	p := newPair(t, setup{})
	p.sender.peers.mu.Lock() // no group of the sender comes to be
	unlock := sync.OnceFunc(p.sender.peers.mu.Unlock)
	defer unlock()
	failed := make(chan error, 1)
	go func() {
		_, err := p.sender.Begin(within(t), p.prefill.peer, 1, p.request(t, 1, 2))
		failed <- err
	}()
	q, err := p.receiver.Accept(within(t))
	require.NoError(t, err)
	require.NoError(t, p.receiver.Close())
	p.receiver.refuse.add(p.decode.peer, 5, Closed) // as at that moment
	require.NoError(t, p.receiver.Close())
	require.Empty(t, p.receiver.refuse.list)
	unlock()
	err = <-failed
	require.ErrorIs(t, err, engine.ErrClosed)
	var end *EndError
	require.ErrorAs(t, err, &end)
	require.True(t, end.Remote)
	require.ErrorIs(t, q.Err(), engine.ErrClosed)
	q.Release()
	require.Zero(t, p.pool.Stats().Used)
}

// TestDoneComesBehindThePool: a request is not done before the pool has its blocks back.
func TestDoneComesBehindThePool(t *testing.T) {
	p := newPair(t, setup{})
	push, q := p.begin(t, 1, 1, 2)
	q.mu.Lock() // holds up what gives them back
	over, cancel := context.WithCancel(context.Background())
	cancel()
	_ = q.Cancel(over)
	select {
	case <-q.Done():
		t.Error("done before its blocks were given back")
	case <-time.After(atOnce):
	}
	q.mu.Unlock()
	<-q.Done()
	require.Zero(t, p.pool.Stats().Used)
	<-push.Ended()
	q.Release()
}

// TestEndsBetweenImports: the context of Begin, or the receiver, ends a request while a lease is
// imported. The push has not ended before that is over: all imports are given back but the one that
// is kept.
func TestEndsBetweenImports(t *testing.T) {
	for want, end := range map[error]func(*pair, context.CancelFunc){
		context.Canceled: func(_ *pair, cancel context.CancelFunc) { cancel() },
		ErrCancelled: func(p *pair, _ context.CancelFunc) {
			q, err := p.receiver.Accept(context.Background())
			if err == nil {
				q.Release()
			}
		},
	} {
		testkit.RunInVirtualTime(t, want.Error(), func(t *testing.T) {
			ctx, cancel := context.WithCancel(within(t))
			imports, standing := 0, 0
			var p *pair
			p = newPair(t, setup{backend: func(t testing.TB) driver.Backend {
				return counted{newMem(t), func() {
					standing++
					if imports++; imports == 3 {
						end(p, cancel)
						time.Sleep(time.Second) // until all others have done what they can
					}
				}, func() { standing-- }}
			}})
			_, err := p.sender.Begin(ctx, p.prefill.peer, 1, p.request(t, 1, 2, 3, 4, 5, 6, 7, 8))
			require.ErrorIs(t, err, want)
			if errors.Is(want, ErrCancelled) {
				standing-- // the third one has failed
			}
			require.Equal(t, []int{3, 1}, []int{imports, standing})
		})
	}
}

// TestCloseWaitsForWhatIsLeft closes a Sender while a Push gives back what it holds.
func TestCloseWaitsForWhatIsLeft(t *testing.T) { testkit.InVirtualTime(t, closeWaitsForWhatIsLeft) }

func closeWaitsForWhatIsLeft(t *testing.T) {
	dropping, goOn := make(chan struct{}), make(chan struct{})
	var first sync.Once
	p := newPair(t, setup{backend: func(t testing.TB) driver.Backend {
		return counted{newMem(t), func() {}, func() {
			first.Do(func() {
				close(dropping)
				<-goOn
			})
		}}
	}})
	push, q := p.begin(t, 1, 1, 2)
	go push.Abort(within(t))
	<-dropping
	closed := make(chan error, 1)
	go func() { closed <- p.sender.Close() }()
	select {
	case err := <-closed:
		t.Errorf("Close has not waited for a Push: %v", err)
	case <-time.After(atOnce):
	}
	close(goOn)
	<-push.Ended()
	if !t.Failed() {
		require.NoError(t, <-closed)
	}
	<-q.Done()
}

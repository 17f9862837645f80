// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"bytes"
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// slowEnd is mem whose batches are held back, and whose Close of a Peer waits for those, as tcp's
// does for a slow link.
type slowEnd struct {
	*mem.Backend
	mu   sync.Mutex
	hold bool
	held []func()
	free chan struct{}
}

type slowPeer struct {
	driver.Peer
	s *slowEnd
}

func (s *slowEnd) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	p, err := s.Backend.Connect(ctx, addr)
	return &slowPeer{p, s}, err
}

func (p *slowPeer) Submit(tag uint64, b *driver.Batch) error {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	if !p.s.hold || len(b.Descs) == 0 {
		return p.Peer.Submit(tag, b)
	}
	own := *b
	own.Descs, own.Notify = append([]driver.Desc(nil), b.Descs...), bytes.Clone(b.Notify)
	p.s.held = append(p.s.held, func() { _ = p.Peer.Submit(tag, &own) })
	return nil
}

func (p *slowPeer) Close() error {
	p.s.mu.Lock()
	waiting := len(p.s.held) > 0
	p.s.mu.Unlock()
	if waiting {
		<-p.s.free
	}
	return p.Peer.Close()
}

func (s *slowEnd) release() {
	s.mu.Lock()
	held := s.held
	s.held, s.hold = nil, false
	s.mu.Unlock()
	for _, f := range held {
		f()
	}
	close(s.free)
}

// TestAbortWaitsForTheProof has a transfer end long after AbortTimeout and the engine's AbortGrace:
// Abort does not say before that the blocks may change, and the region is free afterwards.
func TestAbortWaitsForTheProof(t *testing.T) {
	var list []*slowEnd
	p := newPair(t, setup{
		backend: func(t testing.TB) driver.Backend {
			b, err := mem.New(mem.Config{})
			require.NoError(t, err)
			list = append(list, &slowEnd{Backend: b, free: make(chan struct{})})
			return list[len(list)-1]
		},
		engine: func(c *engine.Config) { c.AbortGrace = 20 * time.Millisecond },
		sender: func(c *SenderConfig) { c.AbortTimeout = 20 * time.Millisecond },
	})
	push, q := p.begin(t, 1, 1)
	wire := list[0]
	wire.mu.Lock()
	wire.hold = true
	wire.mu.Unlock()
	require.NoError(t, push.Layer(within(t), 0))
	aborted := make(chan error, 1)
	go func() { aborted <- push.Abort(within(t)) }()
	select {
	case err := <-aborted:
		t.Fatalf("Abort has returned %v with a transfer under way", err)
	case <-time.After(300 * time.Millisecond):
	}
	wire.release()
	require.NoError(t, <-aborted)
	before := bytes.Clone(p.decode.region.Bytes())
	for i := range p.prefill.region.Bytes() {
		p.prefill.region.Bytes()[i]++
	}
	require.True(t, bytes.Equal(before, p.decode.region.Bytes()))
	require.NoError(t, p.sender.Close())
	require.NoError(t, p.prefill.region.Close())
	q.Release()
}

// TestLastWordIsNoSignOfLife repeats that all layers were sent: the request ends all the same
// when none comes.
func TestLastWordIsNoSignOfLife(t *testing.T) {
	p := newPair(t, setup{blocks: 4, receiver: func(c *ReceiverConfig) {
		c.IdleTimeout = 50 * time.Millisecond
	}})
	push, q := p.begin(t, 1, 1, 2, 3, 4)
	for end := time.Now().Add(5 * time.Second); !isClosed(q.closed); time.Sleep(
		5 * time.Millisecond) {
		require.True(t, time.Now().Before(end), "the blocks are the sender's for ever")
		_ = p.prefill.peer.Notify(within(t), appendHeader(nil, toReceiver, kindDone, 0,
			push.session))
	}
	_ = push.Abort(within(t))
	q.Release()
}

// TestOnePeerLeavesRoomForOthers has one peer begin as many requests as it may: what is beyond
// is refused, and another peer's is granted.
func TestOnePeerLeavesRoomForOthers(t *testing.T) {
	s := setup{blocks: 8, receiver: func(c *ReceiverConfig) { c.RequestsMax = 4 }}
	p := newPair(t, s)
	s.model = small
	s.backend = newMem
	other := &pair{decode: p.decode, pool: p.pool, receiver: p.receiver,
		filled:  map[uint32]uint64{},
		prefill: newSide(t, "other", s, layout.Options{Blocks: prefillBlocks})}
	other.prefill.peer = connect(t, other.prefill.eng, p.decode.eng)
	connect(t, p.decode.eng, other.prefill.eng)
	var err error
	other.sender, err = NewSender(other.prefill.mux, SenderConfig{Region: other.prefill.region,
		Geometry: other.prefill.geometry})
	require.NoError(t, err)
	defer other.sender.Close()
	for i := range uint64(3) {
		push, q := p.begin(t, i+1, i+1)
		defer q.Release()
		defer func() { _ = push.Abort(within(t)) }()
	}
	_, err = p.sender.Begin(within(t), p.prefill.peer, 9, p.request(t, 9))
	require.ErrorIs(t, err, ErrRefused)
	push, q := other.begin(t, 4, 4)
	defer q.Release()
	require.NoError(t, push.Abort(within(t)))
}

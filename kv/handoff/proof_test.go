// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
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

// TestAbortAsksForTheProofOfWhatHasEnded: a layer that ended by itself may have done so without.
func TestAbortAsksForTheProofOfWhatHasEnded(t *testing.T) {
	var prefill *doubtful
	p := newPair(t, setup{backend: func(testing.TB) driver.Backend {
		b, err := mem.New(mem.Config{})
		require.NoError(t, err)
		d := &doubtful{Backend: b}
		if prefill == nil {
			prefill = d
		}
		return d
	}})
	push, q := p.begin(t, 1, 1)
	prefill.mu.Lock()
	prefill.doubt = true
	prefill.mu.Unlock()
	require.NoError(t, push.Layer(within(t), 0))
	<-push.Ended()
	require.ErrorIs(t, push.Err(), driver.ErrUnproven)
	require.ErrorIs(t, push.Abort(within(t)), driver.ErrUnproven)
	require.NotErrorIs(t, push.Abort(within(t)), ErrInUse, "a peer that does not answer is not us")
	q.Release()
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

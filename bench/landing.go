// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/engine"
)

// landing is a small write that both ends see land: its last 8 bytes are a number. No
// message is sent, and no call made by the end that it arrives at.
type landing struct {
	t    *engine.Transfer
	from *atomic.Uint64 // the number that is sent
	here *atomic.Uint64 // the number that the peer has sent
}

// LandingBytes is what each side of a WritePing needs.
func LandingBytes(size uint64) uint64 { return 2 * landingStride(size) }

// landingStride keeps what is sent and what lands on cache lines of their own.
func landingStride(size uint64) uint64 { return (size + 63) &^ 63 }

// newLanding makes one of a size that is a multiple of 8.
func newLanding(l *Link, size uint64) (*landing, error) {
	if size < 8 || size%8 != 0 {
		return nil, fmt.Errorf("a landing of %d bytes, want a multiple of 8: %w", size, ErrShape)
	}
	t, err := l.Engine.NewTransfer(l.Peer, engine.Write, engine.Route{Only: l.Only})
	if err != nil {
		return nil, err
	}
	if err := t.Add(l.Local, 0, l.Remote, landingStride(size), size); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	memory := l.Local.Bytes()
	n := &landing{t: t, from: word(memory[size-8:]),
		here: word(memory[landingStride(size)+size-8:])}
	n.here.Store(0)
	return n, nil
}

func (n *landing) send(v uint64) error {
	n.from.Store(v)
	return n.t.Post()
}

// await spins until a number has landed. What was sent before is done then, or nearly so.
func (n *landing) await(ctx context.Context, want uint64) error {
	for turn := 1; n.here.Load() != want; turn++ {
		if turn%(1<<14) == 0 && ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	return nil
}

// settle takes the completion, so that n can be sent again.
func (n *landing) settle(ctx context.Context) error {
	for turn := 1; !n.t.Done(); turn++ {
		if turn%(1<<14) == 0 && ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	return n.t.Err()
}

// WritePing writes a number to the peer count times, and after each looks at its own
// memory until the peer's answer has landed there. It returns the times of the round
// trips: what ib_write_lat measures, which reports half of them.
func WritePing(ctx context.Context, l Link, size uint64, count int) (*Samples, error) {
	n, err := newLanding(&l, size)
	if err != nil {
		return nil, err
	}
	defer n.t.Close()
	s := NewSamples(count)
	for i := range uint64(count) {
		start := time.Now()
		if err := errors.Join(n.send(i+1), n.settle(ctx), n.await(ctx, i+1)); err != nil {
			return nil, fmt.Errorf("write ping %d: %w", i, err)
		}
		s.Add(time.Since(start))
	}
	return s, nil
}

// WritePong answers count pings in the same way. begun is called when they may come.
func WritePong(ctx context.Context, l Link, size uint64, count int, begun func() error) error {
	n, err := newLanding(&l, size)
	if err != nil {
		return err
	}
	defer n.t.Close()
	if err := begun(); err != nil {
		return err
	}
	for i := range uint64(count) {
		if err := errors.Join(n.await(ctx, i+1), n.send(i+1), n.settle(ctx)); err != nil {
			return fmt.Errorf("write pong %d: %w", i, err)
		}
	}
	return nil
}

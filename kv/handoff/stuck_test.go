// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

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
}

// TestNoSuccessWithoutProof: all bytes came, but more might.
func TestNoSuccessWithoutProof(t *testing.T) { testkit.InVirtualTime(t, noSuccessWithoutProof) }

func noSuccessWithoutProof(t *testing.T) {
	p, fails := newStubborn(t)
	push, q := p.begin(t, 1, 1)
	fails.Store(1 << 40)
	for layer := range small.Layers {
		require.NoError(t, push.Layer(within(t), layer))
	}
	err := push.Finish(within(t))
	fails.Store(0)
	<-q.Done()
	time.Sleep(time.Minute) // until the engine has looked again
	var end *EndError
	if !errors.As(err, &end) || end.Reason != Failed || !errors.Is(q.Err(), errStuck) {
		t.Errorf("sender: %v, receiver: %v", err, q.Err())
	}
}

// TestRevokeTriesAgain: a proof that comes late is a proof.
func TestRevokeTriesAgain(t *testing.T) { testkit.InVirtualTime(t, revokeTriesAgain) }

func revokeTriesAgain(t *testing.T) {
	p, fails := newStubborn(t)
	_, q := p.begin(t, 1, 1)
	fails.Store(revokeTries - 1)
	require.NoError(t, q.Cancel(within(t)))
	p.fence(t, q.Blocks...)()
	if !errors.Is(q.Err(), ErrCancelled) || errors.Is(q.Err(), engine.ErrTimeout) {
		t.Errorf("receiver: %v", q.Err())
	}
}

// TestQuarantinedLeasesAreGivenBack: the proof comes after the Receiver has given it up. The pool
// has its blocks back, and the leases go, so that the program may close the region.
func TestQuarantinedLeasesAreGivenBack(t *testing.T) {
	testkit.InVirtualTime(t, quarantinedLeasesAreGivenBack)
}

func quarantinedLeasesAreGivenBack(t *testing.T) {
	p, fails := newStubborn(t)
	before := p.decode.eng.Stats().Leases
	push, q := p.begin(t, 1, 1, 2, 3)
	fails.Store(1 << 40)
	require.ErrorIs(t, q.Cancel(within(t)), engine.ErrUnproven)
	<-push.Ended()
	require.ErrorIs(t, p.decode.region.Close(), engine.ErrBusy)
	fails.Store(0) // from here on each revoke has its proof
	time.Sleep(time.Minute)
	require.Equal(t, before, p.decode.eng.Stats().Leases)
	p.receiver.Close()
	require.NoError(t, p.decode.region.Close())
}

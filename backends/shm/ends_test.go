// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// A peer that stands in the middle of a copy as the owner's backend closes writes nothing into
// memory that outlives it.
func TestNothingLandsAfterBackendClose(t *testing.T) {
	owner, b := hasty(t), open(t, Config{})
	buf, far := shared(t, owner, 1<<20, 1)
	src, near := shared(t, b, 1<<20, 2)
	fill(src.Bytes(), late)
	p := dial(t, b, owner.Addr())
	release := parkedMover(t, b, p, "shm: mapped",
		driver.Desc{Len: 4096, Remote: 8192, LocalKey: near.Key(), RemoteKey: importOf(t, p, far)})
	require.NoError(t, owner.Close())
	require.NoError(t, far.Revoke(t.Context()))
	clear(buf.Bytes())
	_ = release()
	nothingLate(t, buf.Bytes(), "after Close")
}

// A second Revoke leaves alone the memory that has the key now.
func TestRevokeTwiceLeavesTheNextMemoryAlone(t *testing.T) {
	owner, b := open(t, Config{}), open(t, Config{})
	_, old := shared(t, owner, 1<<20, 1)
	_, near := shared(t, b, 1<<20, 2)
	p := dial(t, b, owner.Addr())
	require.NoError(t, old.Revoke(t.Context()))
	_, next := shared(t, owner, 1<<20, 3)
	require.Equal(t, old.Key(), next.Key())
	key := importOf(t, p, next)
	require.NoError(t, old.Revoke(t.Context()))
	require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write,
		Descs: []driver.Desc{{Len: 8, LocalKey: near.Key(), RemoteKey: key}}}))
	require.NoError(t, await(t, b, 1))
}

// pauses calls standStill in the first rest of a Revoke, and f in its second.
type pauses struct {
	context.Context
	count         int
	standStill, f func()
}

func (p *pauses) Done() <-chan struct{} {
	switch p.count++; p.count {
	case 1:
		p.standStill()
	case 2:
		p.f()
	}
	return p.Context.Done()
}

// While the owner stands still it learns nothing of its peers: none is shut out for that time.
func TestGraceDoesNotCountWhileTheOwnerStandsStill(t *testing.T) {
	clock := testkit.NewClock()
	owner, b := openBy(t, clock, Config{}), open(t, Config{})
	_, far := shared(t, owner, 1<<20, 1)
	_, near := shared(t, b, 1<<20, 2)
	p := dial(t, b, owner.Addr())
	release := parkedMover(t, b, p, "shm: mapped",
		driver.Desc{Len: 4096, LocalKey: near.Key(), RemoteKey: importOf(t, p, far)})
	generation := owner.table.generation(far.arena.index)
	alike(t, far) // so that the arena stays
	before := generation.Load()
	ctx := &pauses{Context: t.Context(), f: func() { _ = release() },
		standStill: func() { clock.Advance(2 * owner.cfg.Grace) }}
	defer clock.Run(time.Millisecond)()
	require.NoError(t, far.Revoke(ctx))
	require.Equal(t, before, generation.Load(), "a peer that was never silent was shut out")
}

// What Backend.Close could not prove Memory.Revoke does not say either.
func TestRevokeAfterBackendClose(t *testing.T) {
	owner, err := New(Config{})
	require.NoError(t, err)
	b := open(t, Config{})
	far, _ := share(t, owner, drivertest.ForeignMemory, heldBytes)
	other, _ := share(t, owner, drivertest.ForeignMemory, 4096)
	token, err := far.AppendToken(nil)
	require.NoError(t, err)
	source, ended := heldUp(t, b, owner.Addr(), token)
	require.ErrorIs(t, owner.Close(), driver.ErrTimeout)
	require.ErrorIs(t, far.Revoke(t.Context()), driver.ErrTimeout)
	require.NoError(t, other.Revoke(t.Context()), "nobody writes there")
	source.Supply(t)
	_ = ended()
}

// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// What lands between Enter and Leave is never lost, although the pages move all the time.
func TestRenewLosesNothingThatLands(t *testing.T) {
	b := mustAlloc(t, 1<<20, Options{Huge: HugeNone})
	mem := b.Bytes()
	var stop atomic.Bool
	var all sync.WaitGroup
	for part := range 3 {
		mine := mem[4096+512*part:][:512] // of one page
		all.Go(func() {
			for n := 0; !stop.Load(); n++ {
				b.Enter()
				for i := range mine {
					mine[i] = byte(n)
				}
				b.Leave()
				for i := range mine {
					if mine[i] != byte(n) {
						t.Errorf("byte %d of landing %d is lost", i, n)
						return
					}
				}
			}
		})
	}
	for range 300 {
		require.NoError(t, b.Renew(t.Context(), 4096, 100))
	}
	stop.Store(true)
	all.Wait()
}

// A Renew waits for what has entered, and what comes then waits for the Renew.
func TestRenewWaitsForLandings(t *testing.T) {
	defer func(d time.Duration) { enteredMax = d }(enteredMax)
	enteredMax = time.Minute
	b := mustAlloc(t, 1<<20, Options{Huge: HugeNone})
	renewals := renewalsOf(t, b)
	b.Enter()
	renewed := make(chan error, 1)
	go func() { renewed <- b.Renew(t.Context(), 0, 4096) }()
	for b.landings.phase.Load() != renewWaits {
		time.Sleep(100 * time.Microsecond)
	}
	b.Enter() // after patience it goes first: the one inside may depend on it
	require.Empty(t, renewed)
	require.Zero(t, renewals.Load())
	b.Leave()
	b.Leave()
	require.NoError(t, <-renewed)
	require.EqualValues(t, 1, renewals.Load())
}

// A landing that comes while pages move waits for their end.
func TestLandingWaitsWhilePagesMove(t *testing.T) {
	b := mustAlloc(t, 1<<20, Options{Huge: HugeNone})
	require.NoError(t, b.landings.Stop(t.Context()))
	entered := make(chan struct{})
	go func() { b.Enter(); close(entered) }()
	select {
	case <-entered:
		t.Fatal("a landing began while pages moved")
	case <-time.After(3 * patience):
	}
	b.landings.Resume()
	<-entered
	b.Leave()
}

func TestRenewGivesUpOnALandingThatStays(t *testing.T) {
	defer func(d time.Duration) { enteredMax = d }(enteredMax)
	enteredMax = 20 * time.Millisecond
	b := mustAlloc(t, 1<<20, Options{Huge: HugeNone})
	renewals := renewalsOf(t, b)
	b.Enter()
	require.ErrorIs(t, b.Renew(t.Context(), 0, 4096), driver.ErrBusy)
	require.Zero(t, renewals.Load())
	b.Leave()
	require.NoError(t, b.Renew(t.Context(), 0, 4096))
}

// TestRenewEndsWithItsContext: neither a landing that stays nor another Renew that waits for it
// holds up one whose caller gives up, and the memory can be mapped meanwhile.
func TestRenewEndsWithItsContext(t *testing.T) {
	defer func(d time.Duration) { enteredMax = d }(enteredMax)
	enteredMax = time.Hour
	b := mustAlloc(t, 1<<20, Options{Huge: HugeNone})
	renewals := renewalsOf(t, b)
	b.Enter()
	ctx, cancel := context.WithCancel(t.Context())
	first := make(chan error, 1)
	go func() { first <- b.Renew(ctx, 0, 4096) }()
	for b.landings.phase.Load() != renewWaits {
		time.Sleep(100 * time.Microsecond)
	}
	short, done := context.WithTimeout(t.Context(), time.Millisecond)
	defer done()
	require.ErrorIs(t, b.Renew(short, 4096, 4096), driver.ErrTimeout)
	require.Len(t, extentsOf(b), 1)
	cancel()
	require.ErrorIs(t, <-first, context.Canceled)
	require.Zero(t, renewals.Load())
	b.Leave()
	require.NoError(t, b.Renew(t.Context(), 0, 4096))
}

func BenchmarkEnterLeave(b *testing.B) {
	buf, err := Alloc(1<<20, Options{})
	require.NoError(b, err)
	defer buf.Close()
	for b.Loop() {
		buf.Enter()
		buf.Leave()
	}
}

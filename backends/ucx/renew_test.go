// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// openOwn opens a backend with registered memory of its own.
func openOwn(t *testing.T) (seg driver.Segment, m *memory, near *side) {
	t.Helper()
	b := openReal(t, Config{Transports: NearTransports})
	seg, owner, err := b.Alloc(1 << 20)
	require.NoError(t, err)
	seg.Secret = [16]byte{1}
	registered, err := b.Register(seg)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, registered.Close())
		require.NoError(t, owner.Close())
		require.NoError(t, b.Close())
	})
	return seg, registered.(*memory), b.near
}

// TestRefreshLosesNothingThatLands: what another backend lands between Enter and Leave stays,
// although a fence puts fresh pages under the memory all the time.
func TestRefreshLosesNothingThatLands(t *testing.T) {
	leak.Check(t)
	seg, m, near := openOwn(t)
	var over atomic.Bool
	var all sync.WaitGroup
	for part := range 2 {
		mine := seg.Mem[4096+512*part:][:512] // of one page
		all.Go(func() {
			for n := 0; !over.Load(); n++ {
				seg.Shared.Enter()
				for i := range mine {
					mine[i] = byte(n)
				}
				seg.Shared.Leave()
				for i := range mine {
					if mine[i] != byte(n) {
						t.Errorf("byte %d of landing %d is lost", i, n)
						return
					}
				}
			}
		})
	}
	for range 100 {
		require.NoError(t, m.refresh(t.Context(), near))
	}
	over.Store(true)
	all.Wait()
}

// TestRefreshOfHeldPages: a device, or a peer that writes by system calls, would go on with the old
// ones.
func TestRefreshOfHeldPages(t *testing.T) {
	leak.Check(t)
	seg, m, near := openOwn(t)
	told := 0
	stop := seg.Shared.OnRenew(func() func() bool { told++; return nil })
	release, err := seg.Shared.(driver.Holder).Hold()
	require.NoError(t, err)
	require.ErrorIs(t, m.refresh(t.Context(), near), driver.ErrBusy)
	release()
	release()
	require.NoError(t, m.refresh(t.Context(), near))
	stop()
	require.NoError(t, m.refresh(t.Context(), near))
	require.Equal(t, 1, told)

	seg.Shared.Enter()
	moved := make(chan error, 1)
	go func() { moved <- m.refresh(t.Context(), near) }()
	select {
	case err := <-moved:
		t.Fatalf("pages moved under a write: %v", err)
	case <-time.After(20 * time.Millisecond): // it cannot be seen to wait
	}
	seg.Shared.Leave()
	require.NoError(t, <-moved)
}

// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/leak"
	"github.com/sluicehq/sluice/internal/testing/promise"
)

// TestTimedSilence freezes a writer for longer than Config.Grace: it is given up by
// then, its memory can be fenced, and nothing of it lands when it goes on. Then it
// may come again.
func TestTimedSilence(t *testing.T) {
	for name, c := range map[string]struct {
		list string
		own  bool
	}{"direct": {"posix,cma", true}, "served": {"posix,cma", false}, "tcp": {"tcp", false}} {
		t.Run(name, func(t *testing.T) {
			leak.Check(t)
			b := openReal(t, Config{Transports: c.list, Grace: shortGrace})
			defer func() {
				if err := b.Close(); err != nil {
					t.Errorf("close backend: %v", err)
				}
			}()
			seg := memoryFor(t, b, c.own)
			m, err := b.Register(seg)
			require.NoError(t, err)
			w := startWriter(t, c.list)
			for round := range 2 {
				w.write(b, m, "")
				eventually(t, "writes land", func() bool {
					if len(w.lines) > 0 {
						t.Fatalf("round %d: the writer ended with %q", round, w.outcome())
					}
					return seg.Mem[0] == 1 && seg.Mem[writerBytes-1] == 255
				})
				silentRound(t, b, m, w)
				clear(seg.Mem)
				w.thaw()
				for range 20 {
					time.Sleep(5 * time.Millisecond)
					untouched(t, seg.Mem)
				}
				if got := w.outcome(); !strings.Contains(got, driver.ErrPeerLost.Error()) &&
					!strings.Contains(got, driver.ErrRevoked.Error()) {
					t.Errorf("round %d: the writer ended with %q", round, got)
				}
				untouched(t, seg.Mem)
				// The writer has closed its connection by itself: that is its last word.
				eventually(t, "the connection ends", func() bool {
					return len(received(t, b)) == 1
				})
			}
		})
	}
}

func memoryFor(t *testing.T, b *Backend, own bool) driver.Segment {
	t.Helper()
	if own {
		seg, owner, err := b.Alloc(writerBytes)
		require.NoError(t, err)
		t.Cleanup(func() { _ = owner.Close() })
		return seg
	}
	space, err := drivertest.HostMemory(writerBytes)
	require.NoError(t, err)
	t.Cleanup(func() { _ = space.Free() })
	return space.Segment
}

// silentRound freezes the writer and fences: a peer that nothing waits for is not given up.
func silentRound(t *testing.T, b *Backend, m driver.Memory, w *writer) {
	t.Helper()
	w.freeze()
	if err := b.Fence(t.Context(), m.Key()); err != nil {
		t.Errorf("fence against a peer that is frozen: %v", err)
	}
	if msgs := received(t, b); len(msgs) != 0 {
		t.Errorf("messages of a frozen peer: %+v", msgs)
	}
}

func untouched(t *testing.T, mem []byte) {
	t.Helper()
	for i, v := range mem {
		if v != 0 {
			promise.Broken(t, "byte %d landed after the fence", i)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package bench

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/fakecuda"
)

// standIn opens the software stand-in of libcuda, which a process can do once.
func standIn(t *testing.T) *cuda.Device {
	t.Helper()
	library, err := fakecuda.Build()
	require.NoError(t, err)
	t.Cleanup(library.Remove)
	d, err := cuda.OpenDevice(cuda.DeviceOptions{Library: library.Path})
	require.NoError(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func TestGatherOnDevice(t *testing.T) {
	d := standIn(t)
	for _, op := range []driver.Op{driver.Read, driver.Write} {
		s := Shape{Op: op, Size: 656, Batch: 2100, Pages: true, Spread: 6 << 20, Threads: 1}
		t.Run("moves the bytes", func(t *testing.T) { checkMoves(t, d, s) })
		list, err := GatherOnDevice(t.Context(), Card{Device: d, Budget: cuda.Budget{SMs: 2}}, s,
			Options{Rounds: 1, Slice: 1})
		require.NoError(t, err)
		if len(list) != 3 || list[0].Batch != 2100 || list[1].Batch != 2048 ||
			list[2].Batch != 200 {
			t.Fatalf("%+v", list)
		}
		for _, r := range list {
			if r.Backend != StandInName || r.GBps <= 0 || r.P99us < r.P50us ||
				r.Spread < 6<<20-656 || r.Ratio != r.GBps/r.Baseline.GBps {
				t.Errorf("%+v", r)
			}
		}
		if _, there := list[0].Extra["t0-us"]; !there {
			t.Errorf("%v", list[0].Extra)
		}
	}
	cancelled, cancel := context.WithTimeout(t.Context(), time.Nanosecond)
	defer cancel()
	s := Shape{Op: driver.Read, Size: 656, Batch: 100, Pages: true, Spread: 6 << 20, Threads: 1}
	if _, err := GatherOnDevice(cancelled, Card{Device: d, Budget: cuda.Budget{SMs: 2}}, s,
		Options{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("cancelled: %v", err)
	}
	s.Threads = 2
	if _, err := GatherOnDevice(t.Context(), Card{Device: d}, s, Options{}); !errors.Is(err,
		ErrShape) {
		t.Errorf("two threads: %v", err)
	}
	if left := hostmem.InUse()["bench-pool"]; left != 0 {
		t.Errorf("%d bytes left", left)
	}
}

// checkMoves: every variant, and a replay, leaves on either side what a loop of copies leaves.
func checkMoves(t *testing.T, d *cuda.Device, s Shape) {
	g, err := openDevicePool(Card{Device: d, Budget: cuda.Budget{SMs: 1}}, s)
	require.NoError(t, err)
	defer g.close()
	replays, err := g.replays(s.Batch)
	require.NoError(t, err)
	defer replays.close()
	n := int(s.Size)
	for i, way := range []copier{g.moves("", s.Batch), g.moves(cuda.VariantStaged, s.Batch),
		g.moves(cuda.VariantLoop, s.Batch), replays} {
		pool, compact := g.pool.Bytes(), make([]byte, s.CompactBytes())
		for j := range pool {
			pool[j] = byte(j % (251 - i))
		}
		for j := range compact {
			compact[j] = byte(j % (241 - i))
		}
		require.NoError(t, g.onCard.WriteAt(compact, 0))
		want := [2][]byte{bytes.Clone(pool), compact}
		for j, place := range g.plan.places[0] {
			if s.Op == driver.Write {
				copy(want[0][int(place)*n:][:n], compact[j*n:])
			} else {
				copy(want[1][j*n:][:n], pool[int(place)*n:])
			}
		}
		require.NoError(t, way.do(0))
		have := make([]byte, s.CompactBytes())
		if err := g.onCard.ReadAt(have, 0); err != nil || !bytes.Equal(have, want[1]) ||
			!bytes.Equal(pool, want[0]) {
			t.Errorf("way %d differs from a loop of copies, %v", i, err)
		}
	}
}

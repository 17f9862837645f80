// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// counter is an operation that takes no time.
type counter struct {
	n   *atomic.Int64
	err error
}

func (c *counter) do(int) error {
	c.n.Add(1)
	return c.err
}

func counterWay(t *testing.T, name string, s *Shape, n *atomic.Int64, err error) *way {
	t.Helper()
	w, wayErr := newWay(name, s, func(int) (copier, error) { return &counter{n, err}, nil })
	if wayErr != nil {
		t.Fatal(wayErr)
	}
	return w
}

func TestAlternateGivesEveryWayTheSameRounds(t *testing.T) {
	s := &Shape{Op: driver.Write, Size: 1, Batch: 1, Threads: 2}
	var a, b atomic.Int64
	ways := []*way{counterWay(t, "a", s, &a, nil), counterWay(t, "b", s, &b, nil)}
	seen := 0
	o := Options{Rounds: 4, Slice: time.Millisecond, Progress: func(time.Duration) { seen++ }}
	require.NoError(t, alternate(t.Context(), ways, o, 1))
	for _, w := range ways {
		if len(w.rates) != 4 || w.ops < 8 || w.lats.Count() == 0 || w.baseline().GBps <= 0 {
			t.Errorf("way %s: %d rounds, %d ops, %d latencies, %+v", w.name, len(w.rates), w.ops,
				w.lats.Count(), w.baseline())
		}
		if perOp := w.allocs / float64(w.ops); perOp > 0.05 {
			t.Errorf("way %s: %v allocations per operation that does nothing", w.name, perOp)
		}
	}
	if seen != 4 {
		t.Errorf("%d reports of progress, want 4", seen)
	}
	if int(a.Load()) <= ways[0].ops {
		t.Error("the round that warms up was counted")
	}
}

func TestAlternateEnds(t *testing.T) {
	s := &Shape{Op: driver.Write, Size: 1, Batch: 1, Threads: 1}
	var n atomic.Int64
	broken := errors.New("broken")
	o := Options{Slice: time.Millisecond, Time: time.Millisecond}
	if err := alternate(t.Context(), []*way{counterWay(t, "x", s, &n, broken)}, o, 1); !errors.Is(
		err, broken) {
		t.Errorf("error of an operation: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := alternate(ctx, []*way{counterWay(t, "x", s, &n, nil)}, o, 1); !errors.Is(err,
		context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

func TestPlainCopiesEveryPiece(t *testing.T) {
	for _, s := range []*Shape{{Op: driver.Write}, {Op: driver.Read},
		{Op: driver.Write, Pages: true, Gather: true}, {Op: driver.Read, Pages: true,
			Gather: true}} {
		s.Size, s.Batch, s.Threads, s.Spread = 100, 7, 2, 1<<16
		m, err := allocMemories(s, hostmem.HugeNone)
		require.NoError(t, err)
		from := m.compact.Bytes()
		if (s.Op == driver.Read) != s.Gather {
			from = m.scattered.Bytes()
		}
		for i := range from {
			from[i] = byte(i%251 + 1)
		}
		var pieces int
		for _, p := range s.plans() {
			require.NoError(t, m.plain(&p).do(0))
			for j, slot := range p.places[0] {
				l, r := p.compact+uint64(j)*s.stride(), p.scattered+uint64(slot)*s.stride()
				if bytes.Equal(m.compact.Bytes()[l:l+100], m.scattered.Bytes()[r:r+100]) {
					pieces++
				}
			}
		}
		if pieces != 14 {
			t.Errorf("%+v: %d of 14 pieces arrived", s, pieces)
		}
		m.close()
	}
	if left := hostmem.InUse()["bench-baseline"]; left != 0 {
		t.Errorf("%d bytes left", left)
	}
}

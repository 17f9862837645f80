// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// scripted is a rival with these rates, one a measurement; 0 is a failure.
type scripted struct {
	rates []float64
	calls int
}

func (s *scripted) Name() string { return "rival" }

func (s *scripted) Measure(context.Context) (float64, time.Duration, error) {
	v := s.rates[s.calls]
	s.calls++
	if v == 0 {
		return 0, 0, errors.New("broke its leg")
	}
	return v, time.Duration(v * 1000), nil
}

func TestRivalsAreMeasuredBetweenTheRounds(t *testing.T) {
	s := Shape{Op: driver.Write, Size: 64, Batch: 2, Threads: 1}
	good, bad := &scripted{rates: []float64{1, 9, 2}}, &scripted{rates: []float64{1, 0}}
	var progress []time.Duration
	r, err := Run(t.Context(), loop(t, s), s, Options{Rounds: 5, Slice: time.Millisecond,
		Rivals:   []Rival{good, bad},
		Progress: func(d time.Duration) { progress = append(progress, d) }})
	require.NoError(t, err)
	if good.calls != 3 || bad.calls != 2 {
		t.Errorf("measured %d and %d times, want 3, and no more after a failure", good.calls,
			bad.calls)
	}
	if r.Rounds != 6 || len(progress) != 6 || !slices.IsSorted(progress) {
		t.Errorf("%d rounds, progress %v; want 5 rounded up to three blocks", r.Rounds, progress)
	}
	if r.Baseline.Name != "rival" || r.Baseline.GBps != 2 || r.Baseline.P50us != 2 ||
		r.Ratio != r.GBps/2 || len(r.Baselines) != 3 {
		t.Errorf("%+v: want the rival first, with its median", r)
	}
	if len(r.Notes) != 1 || !strings.Contains(r.Notes[0], "broke its leg") {
		t.Errorf("notes %q", r.Notes)
	}
}

func TestRivalsEndWithTheContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	s := Shape{Op: driver.Write, Size: 64, Batch: 2, Threads: 1}
	_, err := Run(ctx, loop(t, s), s, Options{Rounds: 1, Slice: time.Millisecond,
		Rivals: []Rival{cancelling(cancel)}, Bare: true})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}

type cancelling func()

func (cancelling) Name() string { return "cancelling" }

func (f cancelling) Measure(context.Context) (float64, time.Duration, error) {
	f()
	return 0, 0, errors.New("killed")
}

func TestPerfRivalAsksForTheSameShape(t *testing.T) {
	p, seen := pretending(t, "well")
	for op, test := range map[driver.Op]string{driver.Write: "ucp_put_bw", driver.Read: "ucp_get"} {
		r := PerfRival(p, Shape{Op: op, Size: 4096, Batch: 7})
		gbps, batch, err := r.Measure(t.Context())
		if err != nil || gbps <= 0 || r.Name() != PerfName {
			t.Fatalf("%v, %v", gbps, err)
		}
		if want := 4096 * 7 / gbps; float64(batch) > want || float64(batch) < want-1 {
			t.Errorf("a batch takes %v, want %v ns", batch, want)
		}
		found := false
		for _, args := range seen() {
			found = found || strings.Contains(args, "-t "+test+" -s 4096") &&
				strings.Contains(args, "-O 7")
		}
		if !found {
			t.Errorf("%v: %v", op, seen())
		}
	}
}

func TestHotPiecesLieAtOnePlace(t *testing.T) {
	s := Shape{Op: driver.Write, Size: 100, Batch: 5, Threads: 2, Hot: true}
	require.NoError(t, s.Check())
	if s.CompactBytes() != 2*128 || s.ScatteredBytes() != 2*128 {
		t.Errorf("%d and %d bytes", s.CompactBytes(), s.ScatteredBytes())
	}
	for i, p := range s.plans() {
		if p.compact != uint64(i)*128 || p.scattered != uint64(i)*128 || len(p.places) != 1 ||
			!slices.Equal(p.places[0], make([]uint32, 5)) {
			t.Errorf("thread %d: %+v", i, p)
		}
	}
	r, err := Run(t.Context(), loop(t, s), s, Options{Rounds: 1, Slice: time.Millisecond})
	if err != nil || r.GBps <= 0 {
		t.Errorf("%+v, %v", r, err)
	}
	s.Pages = true
	if err := s.Check(); !errors.Is(err, ErrShape) {
		t.Errorf("hot pages: %v", err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// loopEnds are both ends of a bare loop in this process.
func loopEnds(t *testing.T, transports, devices string, compact, scattered uint64) (near,
	far *LoopEnd, spins *[]bool) {
	t.Helper()
	var err error
	if far, err = OpenLoop(transports, devices, scattered); err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	near, err = OpenLoop(transports, devices, compact)
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := near.Close(); err != nil {
			t.Error(err)
		}
		if err := far.Close(); err != nil {
			t.Error(err)
		}
	})
	offer, err := far.Offer()
	require.NoError(t, err)
	spins = &[]bool{}
	err = near.Connect(offer, func(on bool) error {
		*spins = append(*spins, on)
		far.Spin(on)
		return nil
	})
	require.NoError(t, err)
	return near, far, spins
}

func TestLoopStandsBesideTheEngine(t *testing.T) {
	for _, lane := range [][2]string{{"posix,sysv,cma,self", ""}, {"tcp", "lo"}} {
		for _, s := range []Shape{
			{Op: driver.Write, Size: 656, Batch: 16, Pages: true, Spread: 64 << 10, Threads: 1},
			{Op: driver.Read, Size: 5000, Batch: 4, Threads: 1},
			{Op: driver.Write, Size: 8, Batch: 3, Threads: 1, Hot: true},
		} {
			l := loop(t, s)
			var spins *[]bool
			l.Loop, _, spins = loopEnds(t, lane[0], lane[1], s.CompactBytes(), s.ScatteredBytes())
			r, err := Run(t.Context(), l, s, Options{Rounds: 3, Slice: time.Millisecond})
			require.NoError(t, err)
			if r.Baseline.Name != LoopName || r.Baseline.GBps <= 0 || len(r.Baselines) != 3 ||
				len(r.Notes) != 0 {
				t.Errorf("%s: %+v", lane[0], r)
			}
			for _, unit := range []string{"post-ns/piece", "loop-post-ns/piece"} {
				if r.Extra[unit] <= 0 {
					t.Errorf("%s: %v %s", lane[0], r.Extra[unit], unit)
				}
			}
			want := slices.Repeat([]bool{true, false}, 4)
			if lane[0] != "tcp" {
				want = nil
			}
			if !slices.Equal(*spins, want) {
				t.Errorf("%s: the far end is moved so: %v; want %v, during the loop's rounds alone",
					lane[0], *spins, want)
			}
		}
	}
}

func TestLoopMovesThePiecesOfThePlan(t *testing.T) {
	s := Shape{Op: driver.Write, Size: 100, Batch: 5, Pages: true, Spread: 4096, Threads: 1}
	near, far, _ := loopEnds(t, "posix,sysv,cma,self", "", s.CompactBytes(), s.ScatteredBytes())
	p := &s.plans()[0]
	c, err := newLooped(near, p)
	require.NoError(t, err)
	for i := range near.memory {
		near.memory[i] = byte(i%250 + 1)
	}
	require.NoError(t, c.do(1))
	want := make([]byte, s.ScatteredBytes())
	for j, slot := range p.places[1] {
		copy(want[uint64(slot)*100:][:100], near.memory[j*100:])
	}
	if !bytes.Equal(far.memory, want) {
		t.Error("other bytes arrived")
	}
}

func TestLoopOfSeveralThreads(t *testing.T) {
	s := Shape{Op: driver.Write, Size: 64, Batch: 2, Threads: 2}
	l := loop(t, s)
	l.Loop = &LoopEnd{}
	r, err := Run(t.Context(), l, s, Options{Rounds: 1, Slice: time.Millisecond, Bare: true})
	if err != nil || len(r.Baselines) != 0 || len(r.Notes) != 1 ||
		!strings.Contains(r.Notes[0], "one thread") {
		t.Errorf("%+v, %v", r, err)
	}
}

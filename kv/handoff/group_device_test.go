// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package handoff

import (
	"errors"
	"io"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/cuda"
	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/csrc/digest"
	kernel "github.com/sluicehq/sluice/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/standin"
	"github.com/sluicehq/sluice/kv/layout"
)

// standIn opens the software stand-in of libcuda, once: a process has one driver.
var standIn = sync.OnceValues(func() (path string, err error) {
	library, err := standin.BuildCUDA()
	if err != nil {
		return "", err
	}
	defer library.Remove()
	return library.Path, gpu.Load(library.Path)
})

func allocHBM(t testing.TB, b driver.Backend, n uint64) (driver.Segment, io.Closer) {
	seg, owner, err := b.(*cuda.Backend).AllocDevice(0, n)
	require.NoError(t, err)
	return seg, owner
}

// inHBM runs a test with all memory in HBM, and digests of all layers.
func inHBM(t *testing.T, test func(t *testing.T, s crowdSetup)) {
	path, err := standIn()
	require.NoError(t, err)
	for name, pull := range map[string]bool{"push": false, "pull": true} {
		t.Run(name, func(t *testing.T) {
			s := fourToTwo(t, func(t testing.TB) driver.Backend {
				b, err := cuda.New(cuda.Config{Library: path, Budget: kernel.Budget{SMs: 2}})
				require.NoError(t, err)
				return b
			}, pull)
			s.alloc = allocHBM
			config := s.config
			s.config = func(sends bool, g *GroupConfig) {
				config(sends, g)
				g.Digest = all
			}
			test(t, s)
		})
	}
}

// watched counts the cells that a Summer digests.
type watched struct {
	layout.Summer
	mu    sync.Mutex
	cells uint64
}

func (w *watched) SumCells(list []digest.DeviceCells) (layout.Digest, error) {
	sum, err := w.Summer.SumCells(list)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cells += sum.Cells
	return sum, err
}

// TestGroupDigestOfHBM: every cell is digested on both sides, and comes.
func TestGroupDigestOfHBM(t *testing.T) {
	inHBM(t, func(t *testing.T, s crowdSetup) {
		var sums []*watched
		config := s.config
		s.config = func(sends bool, g *GroupConfig) {
			config(sends, g)
			sums = append(sums, &watched{Summer: g.Summer})
			g.Summer = sums[len(sums)-1]
		}
		c := newCrowd(t, s)
		c.handOver(t, layout.Span{From: 3, To: 40})
		var cells [2]uint64
		for i, w := range sums {
			cells[min(1, i/len(c.from))] += w.cells
		}
		const each = 3 * 2 * 4 * 37 // layers, K and V, heads, tokens
		require.Equal(t, [2]uint64{each, each}, cells)
	})
}

// TestGroupDigestOfHBMNamesWhatDiffers is TestGroupDigestNamesWhatDiffers for HBM: the second
// receiver digests other memory than it receives into, with what should come but for some cells.
func TestGroupDigestOfHBMNamesWhatDiffers(t *testing.T) {
	inHBM(t, func(t *testing.T, s crowdSetup) {
		c := newCrowd(t, s)
		j := c.newJob(t, layout.Span{From: 3, To: 40})
		m := c.to[1]
		seg, owner := allocHBM(t, m.backend, m.regions[0].Size())
		seen, err := m.eng.RegisterPrivate("seen", seg)
		require.NoError(t, err)
		t.Cleanup(func() {
			require.NoError(t, seen.Close())
			require.NoError(t, owner.Close())
		})
		m.receive.device[0].Addr = seg.Addr
		looks := &member{side: m.side, regions: []*engine.Region{seen}}
		looks.each(j.to[1], j.span, func(v *layout.View, unit int, token uint64, cell []byte) {
			copy(cell, cellOf(j.number, v, unit, token))
			if v.Layer == 1 && v.Part == "k" && unit == 2 && (token == 11 || token == 30) {
				cell[7] ^= 1
			}
		})
		j.begin(t)
		for _, l := range []int{2, 0, 1} {
			for i, p := range j.pushes {
				if i == 2 || l != 1 { // no other edge has anything to do with it
					require.NoError(t, p.Layer(within(t), l))
				}
			}
			if l != 1 {
				require.Equal(t, l, <-j.requests[1].Ready())
			}
		}
		j.awaitEnd(t)
		require.Empty(t, j.ready(t, 1))
		var what *layout.MismatchError
		require.ErrorAs(t, j.requests[1].Err(), &what)
		require.Equal(t, layout.MismatchError{FromRank: 2, ToRank: 1, Layer: 1, Part: "k",
			Units: [2]int{2, 3}, Tokens: layout.Span{From: 11, To: 31}}, *what)
		for i, err := range j.errs() {
			require.ErrorIs(t, err, layout.ErrMismatch, "rank %d", i)
		}
	})
}

// TestGroupDigestToHBMWithoutASummer: a receiver says what it lacks.
func TestGroupDigestToHBMWithoutASummer(t *testing.T) {
	inHBM(t, func(t *testing.T, s crowdSetup) {
		config := s.config
		s.config = func(sends bool, g *GroupConfig) {
			config(sends, g)
			if !sends {
				g.Digest, g.Summer = nil, nil
			}
		}
		c := newCrowd(t, s)
		j := c.newJob(t, layout.Span{To: 40})
		j.begin(t)
		for i, p := range j.pushes {
			for _, l := range layersOf(c.from[i].side) {
				_ = p.Layer(within(t), l) // the first that comes ends the request
			}
		}
		j.awaitEnd(t)
		told := 0
		for _, q := range j.requests {
			if errors.Is(q.Err(), engine.ErrNotSupported) {
				require.ErrorContains(t, q.Err(), "its digests need a Summer")
				told++
			}
		}
		require.NotZero(t, told)
	})
}

// TestGroupDigestOfHBMNeedsASummer: without one, or with one that cannot, the group is refused when
// it is made, with the cure.
func TestGroupDigestOfHBMNeedsASummer(t *testing.T) {
	inHBM(t, func(t *testing.T, s crowdSetup) {
		c := newCrowd(t, s)
		cannot, err := cuda.New(cuda.Config{Library: standInPath(t)})
		require.NoError(t, err)
		defer cannot.Close()
		cfg := c.config(c.to[0], 0, false, s)
		for cure, summer := range map[string]layout.Summer{"GroupConfig.Summer": nil,
			"Config.Budget is zero": cannot} {
			cfg.Summer = summer
			_, err = NewGroupReceiver(c.to[0].mux, cfg)
			require.ErrorIs(t, err, engine.ErrNotSupported)
			require.ErrorContains(t, err, cure)
		}
	})
}

func standInPath(t *testing.T) string {
	path, err := standIn()
	require.NoError(t, err)
	return path
}

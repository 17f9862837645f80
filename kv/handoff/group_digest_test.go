// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/fault"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// damaged is a crowd whose second receiver looks at other memory than it receives into: at what
// should come, but for some cells of layer 1.
func damaged(t *testing.T, s crowdSetup) (*crowd, *job) {
	config := s.config
	s.config = func(sends bool, g *GroupConfig) {
		config(sends, g)
		g.Digest = all
	}
	c := newCrowd(t, s)
	j := c.newJob(t, layout.Span{From: 3, To: 40})
	m := c.to[1]
	seen := &member{side: m.side}
	for _, b := range m.memory() {
		r, err := m.eng.RegisterPrivate("seen", engine.HostSegment(b))
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, r.Close()) })
		seen.regions = append(seen.regions, r)
		m.receive.memory = [][]byte{b}
	}
	seen.each(j.to[1], j.span, func(v *layout.View, unit int, token uint64, cell []byte) {
		copy(cell, cellOf(j.number, v, unit, token))
		if v.Layer == 1 && v.Part == "v" && unit == 3 && (token == 17 || token == 29) {
			cell[5] ^= 4
		}
	})
	j.begin(t)
	return c, j
}

// TestGroupDigestNamesWhatDiffers: the receiver names the cells, no layer that differs becomes
// ready, and all ranks end.
func TestGroupDigestNamesWhatDiffers(t *testing.T) {
	pushAndPull(t, func(t *testing.T, s crowdSetup) {
		_, j := damaged(t, s)
		for _, l := range []int{2, 0, 1} {
			for i, p := range j.pushes {
				if i == 3 || l != 1 { // no other edge has anything to do with it
					require.NoError(t, p.Layer(within(t), l))
				}
			}
			if l != 1 {
				require.Equal(t, l, <-j.requests[1].Ready())
			}
		}
		j.awaitEnd(t)
		require.Empty(t, j.ready(t, 1))
		var end *EndError
		require.ErrorAs(t, j.requests[1].Err(), &end)
		require.Equal(t, []any{Damaged, false, "prefill-3"},
			[]any{end.Reason, end.Remote, end.Peer})
		var what *layout.MismatchError
		require.ErrorAs(t, end, &what)
		require.Equal(t, layout.MismatchError{FromRank: 3, ToRank: 1, Layer: 1, Part: "v",
			Units: [2]int{3, 4}, Tokens: layout.Span{From: 17, To: 30}}, *what)
		for i, err := range j.errs() {
			require.ErrorIs(t, err, layout.ErrMismatch, "rank %d", i)
		}
	})
}

// TestGroupDigestWithoutAnAnswer: a sender that does not say where ends the request all the same.
func TestGroupDigestWithoutAnAnswer(t *testing.T) {
	s := fourToTwo(t, newMem, false)
	config := s.config
	s.config = func(sends bool, g *GroupConfig) {
		if config(sends, g); !sends {
			g.LayerTimeout = 1
		}
	}
	_, j := damaged(t, s)
	require.NoError(t, j.pushes[3].Layer(within(t), 1))
	j.awaitEnd(t)
	require.ErrorIs(t, j.requests[1].Err(), layout.ErrMismatch)
	require.ErrorContains(t, j.requests[1].Err(), "layer 1 of sending rank 3, it cannot be said")
}

// TestGroupDigestOfSampledLayers: what a backend puts wrong is found in the layers that are
// compared, and in no others.
func TestGroupDigestOfSampledLayers(t *testing.T) {
	for _, sample := range []struct {
		name  string
		layer func(int) bool
		ready int
	}{{"off", nil, 3}, {"last", func(l int) bool { return l == 2 }, 2}, {"all", all, 0}} {
		t.Run(sample.name, func(t *testing.T) {
			spec := grouped(3, 4, 16)
			c := newCrowd(t, crowdSetup{
				from: sidesOf(t, spec, layout.Placement{TP: 2, BlockTokens: 4}),
				to:   sidesOf(t, spec, layout.Placement{BlockTokens: 6}),
				backend: func(t testing.TB) driver.Backend {
					b, err := fault.Wrap(newMem(t), 0, fault.Rule{On: fault.Write,
						AtLeast: 100, Do: fault.BreakCorrupt()})
					require.NoError(t, err)
					return b
				},
				config: func(_ bool, g *GroupConfig) { g.Digest = sample.layer }})
			j := c.newJob(t, layout.Span{To: 40})
			j.begin(t)
			for l := range 3 {
				for _, p := range j.pushes {
					_ = p.Layer(within(t), l) // the request may have ended
				}
				if l < sample.ready {
					require.Equal(t, l, <-j.requests[0].Ready())
				}
			}
			for _, p := range j.pushes {
				go p.Finish(within(t))
			}
			require.Empty(t, j.ready(t, 0))
			j.awaitEnd(t)
			if err := j.requests[0].Err(); sample.layer != nil {
				require.ErrorIs(t, err, layout.ErrMismatch)
				require.NotErrorIs(t, err, engine.ErrTimeout)
			} else {
				require.NoError(t, err)
			}
		})
	}
}

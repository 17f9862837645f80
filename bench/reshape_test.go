// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	kvlayout "github.com/sluicehq/sluice/kv/layout"
)

// smallSpec has layers of all kinds: all tokens, a window, and a state.
func smallSpec() kvlayout.Spec {
	kv := []kvlayout.Cells{{Name: "k", DType: "bf16", Units: 4, Bytes: 24},
		{Name: "v", DType: "bf16", Units: 4, Bytes: 24}}
	return kvlayout.Spec{Name: "small", Tensors: []kvlayout.Tensors{
		{Layers: []int{0, 2, 4}, Parts: kv},
		{Layers: []int{1, 3}, Parts: kv, Window: 20},
		{Layers: []int{5}, Positions: 3, Parts: []kvlayout.Cells{{Name: "conv", DType: "bf16",
			Units: 16, Bytes: 2}}},
	}}
}

func reshaping(t *testing.T, from, to string) Reshaping {
	t.Helper()
	r := Reshaping{Spec: smallSpec(), Tokens: 101, Threads: 2, Memory: BackendMemory,
		Open: func() ([]driver.Backend, error) {
			b, err := mem.New(mem.Config{})
			return []driver.Backend{b}, err
		}}
	for _, g := range []struct {
		text string
		spec *kvlayout.GroupSpec
	}{{from, &r.From}, {to, &r.To}} {
		var err error
		*g.spec, err = kvlayout.ParseGroup(g.text)
		require.NoError(t, err)
	}
	return r
}

var reshapes = [][2]string{
	{"tp=4,block=4", "tp=2,layout=hnd,block=8"},
	{"tp=2,layout=hnd,kv=fused,block=8", "tp=8,layout=nhd,block=4,window=ring"},
	{"tp=2,pp=2,window=ring,block=6", "tp=4,pp=1+2+3,layout=page_head,block=4,state=sd"},
	{"tp=8,layout=cross_layer_hnd,block=4", "tp=1,layout=layer_first,window=all,block=16"},
	{"tp=1,kv=cells,block=5", "tp=4,layout=page_first,block=10"},
	{"tp=8,dcp=2,interleave=2,block=4", "tp=2,block=4"},
	{"tp=2,block=8", "tp=8,dcp=2,interleave=4,block=8"},
}

// TestReshape: a hand-over over mem and shm, whose digests agree.
func TestReshape(t *testing.T) {
	for i, c := range reshapes {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			r := reshaping(t, c[0], c[1])
			if c[0] == "tp=8,layout=cross_layer_hnd,block=4" {
				r.From.AllTokens = true // as the receiver wants them
			}
			if i%2 == 1 {
				r.Only = "shm"
				r.Open = func() ([]driver.Backend, error) {
					b, err := shm.New(shm.Config{})
					return []driver.Backend{b}, err
				}
			}
			if r.From.Shards > 1 || r.To.Shards > 1 { // of two heads, which four ranks hold
				r.Spec.Tensors = r.Spec.Tensors[:1]
				r.Spec.Tensors[0].Layers = []int{0}
				r.Spec.Tensors[0].Parts = []kvlayout.Cells{{Name: "k", DType: "bf16", Units: 2,
					Bytes: 24}}
			}
			before := hostmem.InUse()["bench"]
			res, err := Reshape(t.Context(), r, Options{Rounds: 2, Slice: 1})
			require.NoError(t, err)
			require.Equal(t, ReshapeOp, res.Op)
			require.Equal(t, ReshapeLoopName, res.Baseline.Name)
			require.Positive(t, res.GBps)
			require.Equal(t, res.GBps/res.Baseline.GBps, res.Ratio)
			require.Equal(t, 2, res.Rounds)
			require.Contains(t, res.Workload, "small, 101 tokens, ")
			require.Positive(t, res.Extra["descriptors"])
			require.Equal(t, before, hostmem.InUse()["bench"])
		})
	}
}

// TestReshapeLoop: the loop leaves the same bytes in the memory of all receivers as the engine,
// and copies every cell.
func TestReshapeLoop(t *testing.T) {
	for _, c := range reshapes[:3] {
		r := reshaping(t, c[0], c[1])
		h, err := r.open(t.Context())
		require.NoError(t, err)
		require.NoError(t, h.from.fill(t.Context(), h.span.To, 7))
		require.NoError(t, h.to.wipe(t.Context()))
		require.NoError(t, h.move(t.Context()))
		moved := slices.Clone(h.to.memory.Segment().Mem)
		zeros := 0
		for _, b := range moved {
			if b == 0 {
				zeros++
			}
		}
		require.NotEqual(t, len(moved), zeros)
		require.NoError(t, h.to.wipe(t.Context()))
		require.NoError(t, newReshapeLoop(h.from, h.to, h.span.To, 2).do(0))
		require.Equal(t, moved, h.to.memory.Segment().Mem, c)
		require.NoError(t, h.close())
	}
}

// TestReshapeComparesEveryByte: one byte that differs is found, and where.
func TestReshapeComparesEveryByte(t *testing.T) {
	r := reshaping(t, reshapes[0][0], reshapes[0][1])
	h, err := r.open(t.Context())
	require.NoError(t, err)
	defer h.close()
	require.NoError(t, h.from.fill(t.Context(), h.span.To, 7))
	require.NoError(t, h.move(t.Context()))
	require.NoError(t, h.compare(t.Context()))
	cells := h.cells
	require.Equal(t, uint64(3*2*4*101+2*2*4*20+3*16), cells)
	v := &h.to.sides[1].Views[3] // layer 2, V, of which rank 1 has heads 2 and 3
	at := newSpot(h.to, 1, v)
	at.mem[at.of(57)+v.Unit+23]++
	var wrong *kvlayout.MismatchError
	require.ErrorAs(t, h.compare(t.Context()), &wrong)
	require.Equal(t, kvlayout.MismatchError{FromRank: 3, ToRank: 1, Layer: 2, Part: "v",
		Units: [2]int{3, 4}, Tokens: kvlayout.Span{From: 57, To: 58}}, *wrong)
}

// TestReshapeInterrupted: no memory is taken or written once the context has ended.
func TestReshapeInterrupted(t *testing.T) {
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	r := reshaping(t, reshapes[0][0], reshapes[0][1])
	open := r.Open
	r.Open = func() ([]driver.Backend, error) {
		cancel(cause)
		return open()
	}
	h, err := r.open(ctx)
	require.ErrorIs(t, err, cause)
	require.Nil(t, h.from)
	require.NoError(t, h.close())

	r.Open = open
	h, err = r.open(t.Context())
	require.NoError(t, err)
	defer h.close()
	require.ErrorIs(t, h.from.fill(ctx, h.span.To, 7), cause)
	require.Equal(t, make([]byte, len(h.from.memory.Bytes())), h.from.memory.Bytes())
	require.ErrorIs(t, h.to.wipe(ctx), cause)
}

// TestReshapeRefuses: unlike groups are the planner's errors.
func TestReshapeRefuses(t *testing.T) {
	r := reshaping(t, "tp=2", "tp=2,window=all")
	_, err := Reshape(t.Context(), r, Options{Rounds: 1})
	require.ErrorIs(t, err, kvlayout.ErrUnlike)
	r = reshaping(t, "tp=3", "tp=2")
	_, err = Reshape(t.Context(), r, Options{Rounds: 1})
	require.ErrorIs(t, err, kvlayout.ErrGeometry)
}

// TestReshapeScale: layers are cut to what fits, and stages in proportion.
func TestReshapeScale(t *testing.T) {
	kept := func(r *Reshaping) (list []int) {
		for _, tensors := range r.Spec.Tensors {
			list = append(list, tensors.Layers...)
		}
		slices.Sort(list)
		return list
	}
	r := reshaping(t, "tp=2,pp=2+4", "tp=1")
	require.NoError(t, r.Scale(2, 0))
	require.Equal(t, []int{0, 1, 2}, kept(&r))
	require.Equal(t, []int{1, 2}, r.From.Cuts)
	require.Len(t, r.Notes, 1)
	require.Contains(t, r.Notes[0], "3 of 6 layers")

	r = reshaping(t, "tp=1", "tp=1")
	from, to, err := r.sides()
	require.NoError(t, err)
	need := groupBytes(from) + groupBytes(to)
	require.NoError(t, r.Scale(0, 2*need))
	require.Empty(t, r.Notes)
	require.NoError(t, r.Scale(0, 2*need-2))
	require.Equal(t, []int{0, 1, 2}, kept(&r))
	require.ErrorContains(t, r.Scale(0, 10), "use fewer --tokens")
	r = reshaping(t, "tp=1,pp=6", "tp=1")
	require.ErrorIs(t, r.Scale(2, 0), kvlayout.ErrGeometry)
}

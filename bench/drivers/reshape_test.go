// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/bench"
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

var reshapes = [][2]string{
	{"tp=4,block=4", "tp=2,layout=hnd,block=8"},
	{"tp=2,layout=hnd,kv=fused,block=8", "tp=8,layout=nhd,block=4,window=ring"},
	{"tp=2,pp=2,window=ring,block=6", "tp=4,pp=1+2+3,layout=page_head,block=4,state=sd"},
	{"tp=8,layout=cross_layer_hnd,block=4", "tp=1,layout=layer_first,window=all,block=16"},
	{"tp=1,kv=cells,block=5", "tp=4,layout=page_first,block=10"},
	{"tp=8,dcp=2,interleave=2,block=4", "tp=2,block=4"},
	{"tp=2,block=8", "tp=8,dcp=2,interleave=4,block=8"},
}

// openSmall opens a hand-over of 101 tokens of smallSpec.
func openSmall(t *testing.T, backend, from, to string, byLoop bool) *reshapeEnd {
	t.Helper()
	e := &reshapeEnd{backend: backend, byLoop: byLoop}
	require.NoError(t, e.parse([]string{"llama3.1-8b", from, to, "101"}))
	e.spec = smallSpec()
	e.from.AllTokens = from == reshapes[3][0] // as the receiver wants them
	if e.from.Shards > 1 || e.to.Shards > 1 { // of two heads, which four ranks hold
		e.spec.Tensors = []kvlayout.Tensors{{Layers: []int{0}, Parts: []kvlayout.Cells{{Name: "k",
			DType: "bf16", Units: 2, Bytes: 24}}}}
	}
	_, err := e.Open(&bench.Request{Lane: "reshape", Threads: 2})
	require.NoError(t, err)
	t.Cleanup(e.close)
	return e
}

// TestReshape hands a request over by a plan, and by a loop that is no part of it: the bytes in the
// memory of all receivers are the same, and digests agree.
func TestReshape(t *testing.T) {
	before := hostmem.InUse()["bench"]
	for i, c := range reshapes {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			var memories [2][]byte
			for way, byLoop := range []bool{false, true} {
				e := openSmall(t, []string{"mem", "shm"}[i%2], c[0], c[1], byLoop)
				p, err := e.Prepare("", 0, nil, nil)
				require.NoError(t, err)
				require.Positive(t, p.(bench.Sizer).Bytes())
				e.handing.from.fill(e.span.To, 7)
				e.handing.to.wipe()
				require.NoError(t, p.Post(t.Context()))
				memories[way] = slices.Clone(e.handing.to.memory.Segment().Mem)
			}
			require.NotEqual(t, make([]byte, len(memories[0])), memories[0])
			require.Equal(t, memories[0], memories[1])
		})
	}
	require.Equal(t, before, hostmem.InUse()["bench"])
}

// TestReshapeComparesEveryByte: one byte that differs is found, and where.
func TestReshapeComparesEveryByte(t *testing.T) {
	e := openSmall(t, "mem", reshapes[0][0], reshapes[0][1], false)
	_, err := e.Prepare("", 0, nil, nil)
	require.NoError(t, err)
	require.Equal(t, uint64(3*2*4*101+2*2*4*20+3*16), e.cells)
	v := &e.handing.to.sides[1].Views[3] // layer 2, V, of which rank 1 has heads 2 and 3
	at := newSpot(e.handing.to, 1, v)
	at.mem[at.of(57)+v.Unit+23]++
	var wrong *kvlayout.MismatchError
	require.ErrorAs(t, e.compare(), &wrong)
	require.Equal(t, kvlayout.MismatchError{FromRank: 3, ToRank: 1, Layer: 2, Part: "v",
		Units: [2]int{3, 4}, Tokens: kvlayout.Span{From: 57, To: 58}}, *wrong)
}

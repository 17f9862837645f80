// SPDX-License-Identifier: Apache-2.0

package layout_test

import (
	"errors"
	"fmt"
	"log"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/kv/layout"
)

// Two prefill ranks hand the cache of a request over to one decode rank, which has larger
// blocks and keeps heads outside tokens.
func ExampleNewPlan() {
	spec, err := layout.LookupSpec("llama3.1-8b")
	if err != nil {
		log.Fatal(err)
	}
	side := func(p layout.Placement) *layout.Side {
		s, err := layout.NewSide(spec, p)
		if err != nil {
			log.Fatal(err)
		}
		return s
	}
	prefill := []*layout.Side{
		side(layout.Placement{Rank: 0, TP: 2, Blocks: 1000, Order: layout.VLLMNHD}),
		side(layout.Placement{Rank: 1, TP: 2, Blocks: 1000, Order: layout.VLLMNHD}),
	}
	decode := []*layout.Side{
		side(layout.Placement{BlockTokens: 64, Blocks: 250, Order: layout.VLLMHND}),
	}
	plan, err := layout.NewPlan(prefill, decode) // once
	if err != nil {
		log.Fatal(err) // an *UnlikeError says what to change
	}
	for _, i := range plan.Explain() { // EdgeInfo.String says more, in words
		fmt.Printf("rank %d to %d: %d MiB, %d requests if it pushed, %d if rank %d pulled\n",
			i.FromRank, i.ToRank, i.Bytes>>20, i.ReceiverRuns, i.SenderRuns, i.ToRank)
	}

	// For each request: the block tables of both engines, and the tokens to move. The decode
	// rank has the first 32 already.
	from, to := layout.Tables{{7, 3, 9, 4, 5, 6}}, layout.Tables{{2, 8}}
	span := layout.Span{From: 32, To: 90}
	var patterns []driver.Pattern
	for _, edge := range plan.Edges(0) {
		for _, layer := range edge.Layers[:1] {
			patterns, err = edge.Layer(patterns[:0], layer, from, to, span)
			if err != nil {
				log.Fatal(err)
			}
			for _, p := range patterns { // for Transfer.AddPattern
				fmt.Printf("rank %d: %d entries of %d runs of %d bytes\n", edge.From, p.Count,
					p.Runs(), p.Run)
			}
		}
	}
	// Output:
	// rank 0 to 0: 512 MiB, 131072 requests if it pushed, 32768 if rank 0 pulled
	// rank 1 to 0: 512 MiB, 131072 requests if it pushed, 32768 if rank 0 pulled
	// rank 0: 3 entries of 128 runs of 256 bytes
	// rank 0: 1 entries of 80 runs of 256 bytes
	// rank 1: 3 entries of 128 runs of 256 bytes
	// rank 1: 1 entries of 80 runs of 256 bytes
}

// Both ends of an edge sum the same cells, each in its own memory. Here a byte was lost.
func ExampleDigester() {
	spec := layout.Spec{Name: "small", Tensors: []layout.Tensors{{Layers: []int{0},
		Parts: []layout.Cells{{Name: "k", DType: "bf16", Units: 2, Bytes: 256}}}}}
	nhd, err := layout.NewSide(spec, layout.Placement{Blocks: 4, Order: layout.VLLMNHD})
	if err != nil {
		log.Fatal(err)
	}
	hnd, err := layout.NewSide(spec, layout.Placement{Blocks: 4, Order: layout.VLLMHND})
	if err != nil {
		log.Fatal(err)
	}
	plan, err := layout.NewPlan([]*layout.Side{nhd}, []*layout.Side{hnd})
	if err != nil {
		log.Fatal(err)
	}
	digester, err := plan.NewDigester(layout.Seed{1, 2, 3}) // both ends: the same random seed
	if err != nil {
		log.Fatal(err)
	}
	edge, span := plan.Edges(0)[0], layout.Span{To: 40}
	sender := layout.Held{Memory: [][]byte{make([]byte, nhd.Regions[0].Bytes)},
		Tables: layout.Tables{{2, 0, 1}}, Span: span}
	receiver := layout.Held{Receiver: true, Memory: [][]byte{make([]byte, hnd.Regions[0].Bytes)},
		Tables: layout.Tables{{3, 1, 0}}, Span: span}
	sender.Memory[0][2*16*512+5*512+256] = 7 // token 5, head 1, in block 2

	err = edge.Locate(0, span, func(in layout.Scope) (bool, error) {
		a, err := digester.Layer(&edge, 0, &sender, in)
		if err != nil {
			return false, err
		}
		b, err := digester.Layer(&edge, 0, &receiver, in) // a peer's answer
		return a != b, err
	})
	var m *layout.MismatchError
	if errors.As(err, &m) { // its text says all of it in words
		fmt.Println("layer", m.Layer, m.Part, "heads", m.Units, "tokens", m.Tokens)
	}
	// Output:
	// layer 0 k heads [1 2] tokens {5 6}
}

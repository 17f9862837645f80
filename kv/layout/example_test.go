// SPDX-License-Identifier: Apache-2.0

package layout_test

import (
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
	for _, i := range plan.Explain() { // fmt.Print(plan) says more, in words
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

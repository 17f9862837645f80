// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/kv/layout"
	"github.com/sluicehq/sluice/kv/trace"
)

// Side is one of the two processes.
type Side string

// The sides.
const (
	PrefillSide Side = "prefill"
	DecodeSide  Side = "decode"
)

// Abort is a request that ends in mid-flight.
type Abort struct {
	By Side `json:"by"`
	// the prefill aborts right after posting it; the decode once it is there
	Layer int `json:"layer"`
}

// Plan is what both processes are told.
type Plan struct {
	Model      string          `json:"model"`
	Backend    string          `json:"backend"` // "auto": the engine's choice
	Requests   []trace.Request `json:"requests"`
	Aborts     map[int]Abort   `json:"aborts"`  // by index in Requests
	Speed      float64         `json:"speed"`   // of the arrivals; 0: as fast as possible
	Overlap    bool            `json:"overlap"` // a request is checked while the next one arrives
	PoolBlocks uint64          `json:"pool_blocks"`
	Threads    int             `json:"threads"`  // that copy
	LimitMs    int64           `json:"limit_ms"` // for everything that waits for the other process
	// rules of package fault; a side without any is absent
	Faults  map[Side]string `json:"faults"`
	Meeting string          `json:"meeting"` // the abstract Unix socket that decode listens on
	Offload *Offload        `json:"offload"` // nil: none

	memory uint64 // of both processes
}

// geometry is that of a pool of this plan.
func (p *Plan) geometry(blocks uint64, order layout.Arrangement) (*layout.Geometry, error) {
	m, err := layout.Lookup(p.Model)
	if err != nil {
		return nil, err
	}
	return layout.New(m, layout.Options{BlockTokens: trace.BlockTokens, Arrangement: order,
		Blocks: blocks})
}

// largest returns the most blocks of a request, and its index.
func (p *Plan) largest() (blocks, index int) {
	for i := range p.Requests {
		if n := len(p.Requests[i].HashIDs); n > blocks {
			blocks, index = n, i
		}
	}
	return blocks, index
}

// refs counts the blocks of all requests.
func (p *Plan) refs() (n int) {
	for i := range p.Requests {
		n += len(p.Requests[i].HashIDs)
	}
	return n
}

// abortSeed makes the same requests abort in every run.
const abortSeed = 0x736c75696365 // "sluice"

// portion is how many of n requests a share of them is: rounded, but none for a share of 0 alone.
func portion(n int, share float64) int {
	if n == 0 || share <= 0 {
		return 0
	}
	return max(int(math.Round(share*float64(n))), 1)
}

// planAborts chooses that share of the requests, and for each a side and a layer, taking turns
// between the sides. It is never the last layer: behind that a request may be complete.
func (p *Plan) planAborts(rate float64, layers int) {
	random := rand.New(rand.NewPCG(abortSeed, uint64(len(p.Requests))))
	order := random.Perm(len(p.Requests))
	p.Aborts = map[int]Abort{}
	for i, at := range order[:portion(len(order), rate)] {
		by := PrefillSide
		if i%2 == 1 {
			by = DecodeSide
		}
		p.Aborts[at] = Abort{By: by, Layer: random.IntN(max(layers-1, 1))}
	}
}

// choosePool decides how many blocks decode has. A request that can never fit is
// an error here, before anything starts. bytes 0: half as much again as the largest
// request, twice as much where one is checked while the next arrives, but no more
// than a third of the memory that is available: prefill takes as much at most.
// available 0: not known.
func (p *Plan) choosePool(bytes, available uint64) error {
	g, err := p.geometry(1, layout.BlockMajor)
	if err != nil {
		return err
	}
	largest, at := p.largest()
	need := max(uint64(largest), 1)
	p.PoolBlocks = g.BlocksIn(bytes)
	if bytes == 0 {
		wish := need + need/2
		if p.Overlap {
			wish = 2 * need
		}
		if available > 0 {
			wish = min(wish, g.BlocksIn(available/3))
		}
		p.PoolBlocks = max(need, wish)
	}
	if p.PoolBlocks < need {
		return fmt.Errorf("request %d needs %d blocks (%s), a pool of %s has %d: give it "+
			"--pool %s or more",
			at+1, need, figures.RoundSize(need*g.Stride()), figures.FormatSize(bytes), p.PoolBlocks,
			poolSize(need*g.Stride()))
	}
	want := p.PoolBlocks * g.Stride()
	beside := p.Offload.memory(g) + baselineBytes(uint64(largest)*g.LayerBytes(),
		p.PoolBlocks*g.BlockBytes()) + stagingSlots*uint64(largest)*g.LayerBytes()
	p.memory = want + beside
	if available > 0 && p.memory > available {
		return fmt.Errorf("the pool needs %s for %d blocks of %s, and prefill %s, %s are "+
			"available: use fewer --requests, a smaller --model or a smaller --pool",
			figures.RoundSize(want), p.PoolBlocks, figures.RoundSize(g.Stride()),
			figures.RoundSize(beside), figures.RoundSize(available))
	}
	return nil
}

// poolSize rounds up to a size that is easy to type.
func poolSize(n uint64) string { return figures.FormatSize((n + 1<<20 - 1) &^ (1<<20 - 1)) }

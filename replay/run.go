// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/kv/trace"
)

// Options say what to replay.
type Options struct {
	Model     string
	Backend   string
	Requests  []trace.Request
	Speed     float64       // of the arrivals; 0: as fast as possible
	Overlap   bool          // check a request while the next one arrives, as with Speed
	AbortRate float64       // share of the requests, 0 to 1: above 0 at least one
	PoolBytes uint64        // of the decode side; 0: chosen
	Threads   int           // that copy
	Limit     time.Duration // without a sign of life or progress

	// Faults names what befalls the backends of a side, FaultNames with commas between; absent:
	// nothing. With any, a request that fails is handed over again.
	Faults map[Side]string

	// Offload has the decode process spill blocks to a file, and read them back; nil: none.
	Offload *Offload

	// Start starts a process that runs Prefill or Decode with these files.
	Start func(s Side) (*proc.Child, error)
	// Say is told in a few words what begins; nil: nothing is.
	Say func(what string)
	// Progress is told how much is done of how much.
	Progress func(done, total int64)
}

// plan makes the plan; what cannot work is an error here.
func (o *Options) plan() (*Plan, error) {
	if len(o.Requests) == 0 {
		return nil, fmt.Errorf("the trace has no requests")
	}
	p := &Plan{Model: o.Model, Backend: o.Backend, Requests: o.Requests, Speed: o.Speed,
		Overlap: o.Overlap || o.Speed > 0, Threads: o.Threads,
		LimitMs: o.Limit.Milliseconds()}
	if len(o.Faults) > 0 {
		p.Faults, p.Meeting = o.Faults, meetingPlace()
	}
	if o.Offload != nil {
		own := *o.Offload
		if err := own.choose(p); err != nil {
			return nil, err
		}
		p.Offload = &own
	}
	if err := p.choosePool(o.PoolBytes, hostmem.Limits().Available); err != nil {
		return nil, err
	}
	g, err := p.geometry(1, 0)
	if err != nil {
		return nil, err
	}
	p.planAborts(o.AbortRate, g.Layers())
	return p, nil
}

// stopGrace is how long a process may take to give back what it holds.
const stopGrace = 5 * time.Second

// Run replays. When it returns, both processes are gone.
func Run(ctx context.Context, o Options) (*Report, error) {
	plan, err := o.plan()
	if err != nil {
		return nil, err
	}
	if o.Say == nil {
		o.Say = func(string) {}
	}
	o.Say(fmt.Sprintf("starting two processes, which prepare %s of memory",
		figures.RoundSize(plan.memory)))
	s := &supervisor{crew: newCrew(o.Limit), options: &o, plan: plan}
	defer s.stop()
	for _, side := range []Side{DecodeSide, PrefillSide} {
		c, err := o.Start(side)
		if err != nil {
			return nil, err
		}
		s.children = append(s.children, &child{Child: c})
	}
	r, err := s.supervise(ctx)
	if err != nil {
		return nil, err
	}
	g, err := plan.geometry(plan.PoolBlocks, 0)
	if err != nil {
		return nil, err
	}
	r.PoolBytes = g.PoolBytes()
	return r, nil
}

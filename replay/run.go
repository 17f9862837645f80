// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"crypto/rand"
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

	// Start starts a process that runs Prefill or Decode.
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
		LimitMs: o.Limit.Milliseconds(), Faults: o.Faults, Meeting: "@sluice-replay-" + rand.Text()}
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
	s := &supervisor{processes: newProcesses(o.Limit), options: &o, plan: plan}
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

// supervisor leads both processes through a replay.
type supervisor struct {
	processes // decode, prefill
	options   *Options
	plan      *Plan
	total     int64 // layers of blocks
}

// supervise returns when both results are here, or with the reason why not.
func (s *supervisor) supervise(ctx context.Context) (*Report, error) {
	g, err := s.plan.geometry(1, 0)
	if err != nil {
		return nil, err
	}
	s.total = int64(s.plan.refs()) * int64(g.Layers())
	s.aside = s.hear
	s.listen()
	began := time.Now()
	if err := s.all(ctx, kindPlan, s.plan, kindReady, nil); err != nil {
		return nil, err
	}
	s.ready = true
	setup := time.Since(began)
	s.options.Say(fmt.Sprintf("ready after %v: handing over %d request(s) of %d blocks",
		setup.Round(100*time.Millisecond), len(s.plan.Requests), s.plan.refs()))
	if err := s.all(ctx, kindStart, nil, kindConnected, nil); err != nil {
		return nil, err
	}
	var pre PrefillResult
	var dec DecodeResult
	if err := s.last(ctx, 1, kindRun, &pre); err != nil {
		return nil, err
	}
	if s.plan.Offload != nil {
		s.options.Say("all is handed over: reading back the blocks that were spilled")
	}
	if err := s.last(ctx, 0, kindFinish, &dec); err != nil {
		return nil, err
	}
	return merge(s.plan, &pre, &dec, setup), nil
}

// last tells one process the last thing, and takes its result.
func (s *supervisor) last(ctx context.Context, i int, kind string, result any) error {
	return s.each(ctx, s.children[i:i+1], kind, func(int) any { return nil }, kindResult,
		func(_ int, m *proc.Message) error {
			s.children[i].done = true
			return m.Decode(result)
		})
}

// hear takes what the processes say while they hand over.
func (s *supervisor) hear(c *child, m *proc.Message) error {
	switch m.Kind {
	case kindProgress:
		var done int64
		err := m.Decode(&done)
		if err == nil && s.options.Progress != nil {
			s.options.Progress(done, s.total)
		}
		return err
	case kindOffload:
		return nil // a sign that it moves on
	case kindChecked:
		if s.plan.Overlap {
			return nil
		}
		err := s.children[1].Send(kindChecked, m.Body)
		if s.plan.faulty() {
			return nil // that of a try that failed may come when the prefill has done all
		}
		return err
	}
	return fmt.Errorf("%s process sent %q", c.Name, m.Kind)
}

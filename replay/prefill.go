// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/kv/handoff"
)

// OpenFunc opens the backends that a name stands for.
type OpenFunc func(name string, threads int) ([]driver.Backend, error)

// The messages between the parent and the two processes.
const (
	kindPlan     = "plan"     // Plan, to both
	kindReady    = "ready"    // from both
	kindStart    = "start"    // to both, when both are ready: connect; the answer is kindConnected
	kindProgress = "progress" // from the prefill: how many layers of blocks it has moved
	// from the decode, passed on to the prefill: it has checked a request, or seen its abort
	kindChecked = "checked"
	kindOffload = "offload" // from the decode: it has spilled blocks, or read some back
	kindFinish  = "finish"  // to the decode, when the prefill is done
	kindResult  = "result"  // from both: PrefillResult, DecodeResult
)

// prefill is the process that makes the content of blocks and pushes it.
type prefill struct {
	c        *proc.Control
	plan     Plan
	ctx      context.Context
	staging  *staging
	eng      *engine.Engine
	backends []driver.Backend // of eng
	local    *engine.Region
	peer     *engine.Peer
	sender   *handoff.Sender
	base     *baseline

	landed chan handoff.LayerReport
	layers *figures.Samples
	res    PrefillResult
	done   int64 // layers of blocks
	told   time.Time
}

// Prefill is the prefill process: it connects to the socket that the plan names.
func Prefill(c *proc.Control, open OpenFunc) error {
	p := &prefill{c: c, ctx: c.Context(), layers: figures.NewSamples(1 << 17)}
	if err := c.Expect(kindPlan, &p.plan); err != nil {
		return err
	}
	var err error
	p.eng, p.backends, err = openEngine(open, string(PrefillSide), p.plan.Backend, p.plan.Threads,
		p.plan.patience(), p.plan.Faults[PrefillSide])
	if err != nil {
		return err
	}
	err = p.prepare()
	if err == nil {
		err = p.work()
	}
	return errors.Join(err, p.close())
}

func (p *Plan) limit() time.Duration { return time.Duration(p.LimitMs) * time.Millisecond }

// prepare makes the memory and waits for the other side.
func (p *prefill) prepare() (err error) {
	largest, _ := p.plan.largest()
	if p.staging, err = newStaging(&p.plan, uint64(largest)); err != nil {
		return err
	}
	g := p.staging.geometry
	if p.base, err = newBaseline(uint64(largest)*g.LayerBytes(), p.plan.PoolBlocks*g.BlockBytes(),
		p.plan.Threads); err != nil {
		return err
	}
	if p.local, err = p.eng.Register("staging", p.staging.segment()); err != nil {
		return err
	}
	if err := p.c.Send(kindReady, nil); err != nil {
		return err
	}
	if err := p.c.Expect(kindStart, nil); err != nil {
		return err
	}
	if err := p.dial(); err != nil {
		return err
	}
	if err := p.c.Send(kindConnected, nil); err != nil {
		return err
	}
	return p.c.Expect(kindRun, nil)
}

func (p *prefill) close() error {
	err := p.eng.Close()
	if p.staging != nil {
		err = errors.Join(err, p.staging.close())
	}
	if p.base != nil {
		err = errors.Join(err, p.base.memory.Close())
	}
	return err
}

// work pushes all requests and reports.
func (p *prefill) work() (err error) {
	p.landed = make(chan handoff.LayerReport, p.staging.geometry.Layers())
	limit := p.plan.patience()
	mux := handoff.NewMux(p.eng)
	defer mux.Close()
	p.sender, err = handoff.NewSender(mux, handoff.SenderConfig{
		Region: p.local, Geometry: p.staging.geometry, Route: routeOf(p.plan.Backend),
		Limits: handoff.Limits{Window: 1, MeetTimeout: limit, LayerTimeout: limit,
			TakenTimeout: limit, RevokeTimeout: limit, NotifyTimeout: limit},
		OnLayer: func(r handoff.LayerReport) { p.landed <- r }, // never blocks: one in flight
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.sender.Close()) }()
	if err := p.explain(); err != nil {
		return err
	}
	begin := time.Now()
	for i := range p.plan.Requests {
		if err := p.arrive(begin, i); err != nil {
			return err
		}
		if err := p.request(i); err != nil {
			return fmt.Errorf("request %d: %w", i+1, err)
		}
		if err := p.awaitCheck(i); err != nil {
			return err
		}
	}
	p.res.Replay, p.res.Faults = time.Since(begin), faultsFired(p.backends)
	p.res.LayerUs = quantiles(p.layers, time.Microsecond)
	p.res.Memcpy, p.res.MemcpyBytes = p.base.took, p.base.bytes
	return p.c.Send(kindResult, p.res)
}

// explain records how the bytes move.
func (p *prefill) explain() error {
	remote, err := p.peer.Remote(regionName)
	if err != nil {
		return err
	}
	x, err := p.eng.Explain(p.peer, p.local, remote)
	if err != nil {
		return err
	}
	p.res.Route = cmp.Or(routeOf(p.plan.Backend).Only, x.Chosen)
	return nil
}

// arrive waits until the arrival time of a request. Meanwhile it reports progress, so that the
// parent does not take the process for stuck.
func (p *prefill) arrive(begin time.Time, i int) error {
	if p.plan.Speed <= 0 {
		return nil
	}
	since := p.plan.Requests[i].Arrival() - p.plan.Requests[0].Arrival()
	at := begin.Add(time.Duration(float64(since) / p.plan.Speed))
	for wait := time.Until(at); wait > 0; wait = time.Until(at) {
		select {
		case <-time.After(min(wait, proc.AliveEvery)):
			p.progress(0)
		case <-p.ctx.Done():
			return context.Cause(p.ctx)
		}
	}
	return nil
}

// progress reports to the parent, at a limited rate.
func (p *prefill) progress(more int) {
	p.done += int64(more)
	if time.Since(p.told) > 100*time.Millisecond {
		p.told = time.Now()
		_ = p.c.Send(kindProgress, p.done) // if the pipe has ended, so has the context
	}
}

// awaitCheck waits until the decode process has checked a request, so that checks do not slow down
// the transfers that are measured. The parent limits the wait.
func (p *prefill) awaitCheck(i int) error {
	for checked := -1; !p.plan.Overlap && checked != i; {
		if err := p.c.Expect(kindChecked, &checked); err != nil {
			return err
		}
	}
	return nil
}

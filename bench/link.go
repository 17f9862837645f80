// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// Link is what shapes are measured on: a local region, and a peer's region that
// the peer's program leaves alone meanwhile.
type Link struct {
	Engine *engine.Engine
	Peer   *engine.Peer
	Local  *engine.Region // at least Shape.LocalBytes
	Remote *engine.Remote // at least Shape.RemoteBytes
	Only   string         // the backend; "": the engine's choice
	Memory string         // whose memory Local is, for Result.Memory

	// Loop is the active end of a bare loop over UCX, a baseline of runs on one thread: it
	// needs as much memory as this link. nil: no such baseline.
	Loop *LoopEnd

	// Sockets is over how many bare TCP connections a thread moves the same bytes, as a baseline.
	// 0: no such baseline.
	Sockets int

	// Process and Address say where Remote lies in which process, for the baseline
	// process_vm_writev. 0: no such baseline.
	Process int
	Address uint64
}

// Run measures a shape beside its baselines. It needs memory for the baselines:
// twice the sum of Shape.LocalBytes and Shape.RemoteBytes.
func Run(ctx context.Context, l Link, s Shape, o Options) (Result, error) {
	if err := s.Check(); err != nil {
		return Result{}, err
	}
	o = o.withDefaults()
	o.lists = s.lists()
	r := &runner{link: l, shape: s, plans: s.plans(), bare: o.Bare}
	defer r.close()
	ways, err := r.ways(ctx)
	if err != nil {
		return Result{}, err
	}
	rivals := NewContest(o.Rivals)
	if err := race(ctx, ways, rivals, o, s.BatchBytes()); err != nil {
		return Result{}, fmt.Errorf("measure %v of %d x %d bytes: %w", s.Op, s.Batch, s.Size, err)
	}
	return r.sum(ways, rivals)
}

// runner holds what one run opened.
type runner struct {
	link  Link
	shape Shape
	plans []plan
	bare  bool
	owned []func()
	posts []*posted // of each thread
	loop  *looped   // nil: no such baseline
	notes []string
}

func (r *runner) close() {
	for _, f := range r.owned {
		f()
	}
}

// ways makes the transfers and then the baselines.
func (r *runner) ways(ctx context.Context) ([]*way, error) {
	own, err := newWay("engine", &r.shape, func(t int) (copier, error) {
		return r.post(ctx, &r.plans[t])
	})
	if err != nil {
		return nil, err
	}
	ways := []*way{own}
	if ways, err = r.addSockets(ctx, ways); err != nil {
		return ways, err
	}
	if ways, err = r.addLoop(ways); err != nil || r.bare {
		return ways, err
	}
	for _, b := range []struct {
		name string
		huge hostmem.HugePolicy
	}{{"memcpy", hostmem.HugeNone}, {"memcpy-huge", hostmem.HugeAuto}} {
		m, err := allocMemories(&r.shape, b.huge)
		if err != nil {
			return nil, err
		}
		r.owned = append(r.owned, m.close)
		w, err := newWay(b.name, &r.shape, func(t int) (copier, error) {
			return m.plain(&r.plans[t]), nil
		})
		if err != nil {
			return nil, err
		}
		ways = append(ways, w)
	}
	if r.link.Process == 0 || r.shape.Gather {
		return ways, nil
	}
	name := "process_vm_writev"
	if r.shape.Op == driver.Read {
		name = "process_vm_readv"
	}
	w, err := newWay(name, &r.shape, func(t int) (copier, error) {
		return newVectored(&r.link, &r.plans[t]), nil
	})
	return append(ways, w), err
}

// addSockets adds bare sockets. They come first: the ratio is to them.
func (r *runner) addSockets(ctx context.Context, ways []*way) ([]*way, error) {
	if r.link.Sockets == 0 {
		return ways, nil
	}
	w, err := newWay(SocketsName, &r.shape, func(int) (copier, error) {
		c, err := newSockets(ctx, &r.shape, r.link.Sockets)
		if err == nil {
			r.owned = append(r.owned, c.close)
		}
		return c, err
	})
	return append(ways, w), err
}

// addLoop adds the bare loop over UCX.
func (r *runner) addLoop(ways []*way) ([]*way, error) {
	if r.link.Loop == nil {
		return ways, nil
	}
	if r.shape.Threads > 1 || r.shape.Gather {
		r.notes = append(r.notes, LoopName+" runs on one thread, from one run: not measured "+
			"beside others")
		return ways, nil
	}
	w, err := newWay(LoopName, &r.shape, func(t int) (c copier, err error) {
		r.loop, err = newLooped(r.link.Loop, &r.plans[t])
		return r.loop, err
	})
	for _, p := range r.posts {
		p.posting = NewSamples(samplesMax)
	}
	return append(ways, w), err
}

func (r *runner) sum(ways []*way, rivals *Contest) (Result, error) {
	own := ways[0]
	x, err := r.link.Engine.Explain(r.link.Peer, r.link.Local, r.link.Remote)
	if err != nil {
		return Result{}, err
	}
	route := x.Chosen
	if r.link.Only != "" {
		route = r.link.Only
	}
	s := &r.shape
	res := Result{
		Backend: route, Op: s.Op.String(), Size: s.Size, Batch: s.Batch, Pages: s.Pages,
		Threads: s.Threads,
		GBps:    Median(own.rates), P50us: Micros(own.lats.Percentile(50)),
		P99us:  Micros(own.lats.Percentile(99)),
		Rounds: len(own.rates), Ops: own.ops, Route: route, Memory: r.link.Memory,
	}
	res.OpsPerS = res.GBps * 1e9 / float64(s.BatchBytes())
	res.Hot, res.Gather = s.Hot, s.Gather
	if s.Pages {
		res.Spread = uint64(s.slots()) * s.stride() * uint64(s.Threads)
	}
	if own.ops > 0 {
		res.AllocsPerOp = own.allocs / float64(own.ops)
	}
	r.costs(&res, ways)
	list, notes := rivals.Baselines()
	if r.loop != nil && s.Pages { // the one of the same shape comes first
		list = append([]Baseline{ways[1].baseline()}, list...)
		ways = append([]*way{own}, ways[2:]...)
	}
	for _, w := range ways[1:] {
		list = append(list, w.baseline())
	}
	res.SetBaselines(list)
	res.Notes = append(r.notes, notes...)
	return res, nil
}

// costs adds what a piece costs beyond the bare loop: to post, and in all.
func (r *runner) costs(res *Result, ways []*way) {
	if r.loop == nil {
		return
	}
	n := float64(r.shape.Batch)
	post, loop := r.posts[0].posting.Percentile(50), r.loop.posting.Percentile(50)
	res.Extra = map[string]float64{
		"post-ns/piece":      float64(post) / n,
		"loop-post-ns/piece": float64(loop) / n,
		"over-loop-ns/piece": float64(ways[0].lats.Percentile(50)-ways[1].lats.Percentile(50)) / n,
	}
}

// posted is an operation of the engine: transfers made once, posted in turn.
type posted struct {
	ctx     context.Context
	list    []*engine.Transfer
	posting *Samples // how long Post took; nil: not asked for
}

func (p *posted) do(i int) error {
	t := p.list[i%len(p.list)]
	if p.posting == nil {
		if err := t.Post(); err != nil {
			return err
		}
		return t.Wait(p.ctx)
	}
	begin := time.Now()
	if err := t.Post(); err != nil {
		return err
	}
	p.posting.Add(time.Since(begin))
	return t.Wait(p.ctx)
}

func (r *runner) post(ctx context.Context, p *plan) (copier, error) {
	c := &posted{ctx: ctx}
	r.posts = append(r.posts, c)
	for i := range p.places {
		t, err := r.link.Engine.NewTransfer(r.link.Peer, r.shape.Op,
			engine.Route{Only: r.link.Only})
		if err != nil {
			return nil, err
		}
		r.owned = append(r.owned, func() { t.Close() })
		if err := r.list(t, p, i); err != nil {
			return nil, err
		}
		c.list = append(c.list, t)
	}
	return c, nil
}

// list adds the pieces of one list of places to a transfer.
func (r *runner) list(t *engine.Transfer, p *plan, i int) error {
	size, stride, step := r.shape.Size, r.shape.stride(), r.shape.step()
	if r.shape.Pages {
		pages := engine.Pages{Count: r.shape.Batch, EntryLen: size, LocalStride: stride,
			RemoteStride: stride,
			LocalBase:    p.local(), RemoteBase: p.remote(), Remote: p.places[i]}
		if r.shape.Gather {
			pages.Local, pages.Remote = pages.Remote, nil
		}
		return t.AddPages(r.link.Local, r.link.Remote, pages)
	}
	for j, slot := range p.places[i] {
		err := t.Add(r.link.Local, p.local()+uint64(j)*step, r.link.Remote,
			p.remote()+uint64(slot)*stride, size)
		if err != nil {
			return err
		}
	}
	return nil
}

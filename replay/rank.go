// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/kv/handoff"
	"github.com/sluicehq/sluice/kv/layout"
)

// OpenFunc opens the backends that a name stands for.
type OpenFunc func(name string, threads int) ([]driver.Backend, error)

// The messages between the parent and the ranks. Each rank answers each message of the parent, and
// the parent goes on when all have answered. Fill, run and check are for one round of requests.
const (
	kindPlan      = "plan"      // assignment; the answer is kindMeet
	kindMeet      = "meet"      // meeting: how others reach the rank
	kindPeers     = "peers"     // meetings: connect to all; the answer is kindConnected
	kindConnected = "connected" //
	kindOpen      = "open"      // open the groups of handoff; the answer is kindReady
	kindReady     = "ready"     //
	kindFill      = "fill"      // []request: reserve and fill blocks; the answer is kindFilled
	kindFilled    = "filled"    // []uint64: for each request, the tokens that were present
	kindRun       = "run"       // orders: hand over; the answer is kindEnded
	kindProgress  = "progress"  // at any time: work goes on
	kindHalfway   = "halfway"   // before kindEnded: half of a push is done, kill the victim now
	kindEnded     = "ended"     // []outcome
	kindCheck     = "check"     // compare; the answer is kindChecked: bytes received
	kindChecked   = "checked"   //
	kindClose     = "close"     // close groups and connections; the answer is kindClosed
	kindClosed    = "closed"    //
	kindFinish    = "finish"    // the answer is kindResult: result
	kindResult    = "result"    //
)

// assignment tells a process which rank it is.
type assignment struct {
	Plan  plan `json:"plan"`
	Side  Side `json:"side"`
	Index int  `json:"index"`
}

// meeting is what the other ranks need to connect to a rank and to plan transfers with it.
type meeting struct {
	Description []byte `json:"description"` // of its engine
	Side        []byte `json:"side"`        // its layout.Side
}

// meetings has the meeting of each rank.
type meetings struct {
	Prefill []meeting `json:"prefill"`
	Decode  []meeting `json:"decode"`
}

// orders is the body of kindRun.
type orders struct {
	From []uint64 `json:"from"` // for each request, the number of tokens that the decode side has
	Kill bool     `json:"kill"` // a rank is killed in this round
}

// outcome is the outcome of one request on one rank.
type outcome struct {
	Error    string `json:"error"`    // empty: it is complete
	Planned  bool   `json:"planned"`  // the plan or its faults can cause the error
	Damaged  bool   `json:"damaged"`  // digests differ
	Unproven bool   `json:"unproven"` // bytes of it may still arrive
}

// result is the last message of a rank.
type result struct {
	Checked uint64   `json:"checked"`
	Wrong   uint64   `json:"wrong"`
	First   []string `json:"first"`
	Watched uint64   `json:"watched"`
	Reused  uint64   `json:"reused"`
	Faults  uint64   `json:"faults"` // faults that were injected
	Leaked  uint64   `json:"leaked"` // blocks, leases and requests
	Route   string   `json:"route"`

	// Of a prefill rank only.
	RequestMs Quantiles `json:"request_ms"`
	LayerUs   Quantiles `json:"layer_us"`

	// Of a prefill rank that streams only.
	Bytes       uint64        `json:"bytes"`
	Transfer    time.Duration `json:"transfer_ns"`
	Fill        time.Duration `json:"fill_ns"`
	Digest      time.Duration `json:"digest_ns"`
	Memcpy      time.Duration `json:"memcpy_ns"`
	MemcpyBytes uint64        `json:"memcpy_bytes"`
}

// rank is one process of either group.
type rank struct {
	c     *proc.Control
	ctx   context.Context
	given assignment
	plan  *plan

	backends []driver.Backend
	eng      *engine.Engine
	pools    *pools
	base     *baseline // of a prefill that streams
	mux      *handoff.Mux
	all      meetings
	peers    []*engine.Peer // of the other group
	side     *layout.Side
	// by data-parallel group of the other side
	senders   []*handoff.GroupSender
	receivers []*handoff.GroupReceiver

	flights []*flight // of the round
	work    sync.WaitGroup
	said    time.Time // when it last sent kindProgress

	mu       sync.Mutex
	requests *figures.Samples
	layers   *figures.Samples
	landed   chan time.Duration // of a prefill that streams: how long each layer took
	res      result
}

// flight is one request of the round on this rank.
type flight struct {
	*request
	tables  layout.Tables // nil: this rank has no part of it
	outcome outcome
}

// Rank is the process of one rank of either group.
func Rank(c *proc.Control, open OpenFunc) (err error) {
	r := &rank{c: c, ctx: c.Context(), requests: figures.NewSamples(1 << 12),
		layers: figures.NewSamples(1 << 17)}
	if err := c.Expect(kindPlan, &r.given); err != nil {
		return err
	}
	p := &r.given.Plan
	r.plan = p
	r.eng, r.backends, err = openEngine(open, fmt.Sprintf("%s-%d", r.given.Side, r.given.Index),
		p, r.given.Side)
	if err != nil {
		return err
	}
	r.mux = handoff.NewMux(r.eng)
	err = r.prepare()
	if err == nil {
		err = r.serve()
	}
	err = errors.Join(err, r.closeGroups())
	r.work.Wait()
	r.mux.Close()
	err = errors.Join(err, r.eng.Close())
	if r.pools != nil {
		err = errors.Join(err, r.pools.close())
	}
	if r.base != nil {
		err = errors.Join(err, r.base.memory.Close())
	}
	return err
}

// streams reports whether this rank fills each layer while it hands it over.
func (r *rank) streams() bool { return r.plan.Stream && r.given.Side == PrefillSide }

// prepare makes the pools, and sends the meeting of this rank.
func (r *rank) prepare() error {
	group, poison := &r.plan.Prefill, prefillPoison
	if r.given.Side == DecodeSide {
		group, poison = &r.plan.Decode, decodePoison
	}
	sides, err := allSides(group, r.plan.Spec)
	if err != nil {
		return err
	}
	r.side = sides[r.given.Index]
	r.landed = make(chan time.Duration, len(layersOn(r.side, allRegions)))
	if r.streams() {
		r.pools, err = newRing(r.eng, r.side)
		if err == nil {
			r.base, err = newBaseline(r.plan.Scratch, r.plan.Threads)
		}
	} else {
		r.pools, err = newPools(r.eng, r.side, poison, r.plan.Seed)
	}
	if err != nil {
		return err
	}
	r.pools.progress = r.progress
	description, err := r.eng.Describe()
	if err != nil {
		return err
	}
	encoded, err := r.side.Marshal()
	if err != nil {
		return err
	}
	return r.c.Send(kindMeet, meeting{description, encoded})
}

// serve handles the messages of the parent, up to kindFinish.
func (r *rank) serve() error {
	for {
		m, ok := <-r.c.Messages()
		if !ok {
			return errors.New("the parent process ended")
		}
		var answer string
		var body any
		var err error
		switch m.Kind {
		case kindPeers:
			if err = m.Decode(&r.all); err == nil {
				answer, err = kindConnected, r.connect()
			}
		case kindOpen:
			answer, err = kindReady, r.open()
		case kindFill:
			var round []request
			if err = m.Decode(&round); err == nil {
				answer = kindFilled
				body, err = r.fill(round)
			}
		case kindRun:
			var o orders
			if err = m.Decode(&o); err == nil {
				answer, body = kindEnded, r.run(&o)
			}
		case kindCheck:
			answer, body = kindChecked, r.check()
		case kindClose:
			answer, err = kindClosed, r.closeGroups()
		case kindFinish:
			r.finish()
			return r.c.Send(kindResult, r.res)
		default:
			return fmt.Errorf("parent sent %q", m.Kind)
		}
		if err == nil {
			err = r.c.Send(answer, body)
		}
		if err != nil {
			return err
		}
	}
}

// connect connects to all ranks of the other group at once. With faults it may take several tries.
func (r *rank) connect() error {
	others := r.all.Decode
	if r.given.Side == DecodeSide {
		others = r.all.Prefill
	}
	ctx, cancel := context.WithTimeout(r.ctx, r.plan.limit())
	defer cancel()
	r.peers = make([]*engine.Peer, len(others))
	errs := make([]error, len(others))
	var all sync.WaitGroup
	for i := range others {
		all.Go(func() {
			for {
				r.peers[i], errs[i] = r.eng.Connect(ctx, others[i].Description)
				if errs[i] == nil || len(r.plan.Faults) == 0 || ctx.Err() != nil {
					return
				}
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// open makes a plan from the sides that the ranks have sent, and a member of handoff's group
// protocol, for each data-parallel group of the other side.
func (r *rank) open() error {
	own, others := r.all.Prefill, r.all.Decode
	if r.given.Side == DecodeSide {
		own, others = others, own
	}
	mine, _, err := sidesIn(own, r.side.DP)
	if err != nil {
		return err
	}
	for dp, at := 0, 0; at < len(others); dp++ {
		theirs, peers, err := sidesIn(others, dp)
		if err != nil {
			return err
		}
		senders, receivers := mine, theirs
		if r.given.Side == DecodeSide {
			senders, receivers = receivers, senders
		}
		plan, err := layout.NewPlan(senders, receivers)
		if err != nil {
			return err
		}
		if err := r.openGroup(plan, r.peers[peers[0]:peers[1]]); err != nil {
			return err
		}
		at = peers[1]
	}
	return r.explain()
}

// sidesIn returns the sides of one data-parallel group, and their range in the list.
func sidesIn(list []meeting, dp int) (sides []*layout.Side, at [2]int, err error) {
	for i, m := range list {
		s, err := layout.ParseSide(m.Side)
		if err != nil {
			return nil, at, err
		}
		if s.DP == dp {
			sides, at[1] = append(sides, s), i+1
		}
	}
	at[0] = at[1] - len(sides)
	return sides, at, nil
}

// openGroup makes the sender or the receiver of this rank for one group of the other side.
func (r *rank) openGroup(plan *layout.Plan, peers []*engine.Peer) error {
	limit := r.plan.patience()
	cfg := handoff.GroupConfig{Plan: plan, Index: r.side.Rank, Regions: r.pools.regions,
		Peers: peers, Route: routeOf(r.plan.Backend), OnLayer: r.onLayer,
		Limits: handoff.Limits{MeetTimeout: limit, IdleTimeout: limit, LayerTimeout: limit,
			TakenTimeout: limit, NotifyTimeout: limit, RevokeTimeout: min(limit, 15*time.Second)}}
	if r.plan.Digest {
		cfg.Digest = func(int) bool { return true }
	}
	if r.plan.Stream { // the sender's memory cannot be read once the next layer is in it
		cfg.Edge = func(e *layout.Edge) { e.Op = engine.Write }
	}
	if r.given.Side == PrefillSide {
		s, err := handoff.NewGroupSender(r.mux, cfg)
		if err == nil {
			r.senders = append(r.senders, s)
		}
		return err
	}
	q, err := handoff.NewGroupReceiver(r.mux, cfg)
	if err == nil {
		r.receivers = append(r.receivers, q)
	}
	return err
}

// explain notes which backend moves bytes between this rank and the first rank of the other group.
func (r *rank) explain() error {
	if r.res.Route = routeOf(r.plan.Backend).Only; r.res.Route != "" {
		return nil
	}
	for _, region := range r.pools.regions {
		if region == nil {
			continue
		}
		remote, err := r.peers[0].Remote(region.Name())
		if err != nil {
			continue // that rank has none of these layers
		}
		x, err := r.eng.Explain(r.peers[0], region, remote)
		if err != nil {
			return err
		}
		r.res.Route = x.Chosen
		return nil
	}
	return nil
}

// closeGroups closes the senders, the receivers and the connections. It may be called again.
func (r *rank) closeGroups() error {
	var errs []error
	for _, s := range r.senders {
		errs = append(errs, s.Close())
	}
	for _, q := range r.receivers {
		errs = append(errs, q.Close())
	}
	for _, p := range r.peers {
		if p != nil {
			_ = p.Close()
		}
	}
	r.senders, r.receivers, r.peers = nil, nil, nil
	return errors.Join(errs...)
}

// fill reserves blocks for the requests of a round and writes the content that they have before the
// hand-over. It returns, for each request, how many tokens are present on this rank.
func (r *rank) fill(round []request) ([]uint64, error) {
	r.flights = nil
	from := make([]uint64, len(round))
	for i := range round {
		f := &flight{request: &round[i]}
		r.flights = append(r.flights, f)
		if f.in(r.given.Side, r.side) {
			var err error
			if f.tables, err = r.pools.reserve(f.request); err != nil {
				return nil, err
			}
			if !r.plan.Stream {
				r.pools.fill(f.tables, f.request, allLayers, r.given.Side == DecodeSide)
			}
		}
		from[i] = f.From
	}
	return from, nil
}

// run hands the requests of a round over, all at once. When all have ended, it starts to poison the
// blocks of the failed ones, so that late writes show. It must not poison earlier: while a lease is
// being revoked, shm may replace its pages, and what the program writes to these pages at that
// moment is lost (docs/promises.md).
func (r *rank) run(o *orders) []outcome {
	var all sync.WaitGroup
	for i, f := range r.flights {
		f.From = o.From[i]
		all.Go(func() {
			var err error
			switch {
			case f.tables == nil:
			case r.given.Side == PrefillSide:
				err = r.push(f, o.Kill && i == 0 && f.Holder == r.given.Index)
			default:
				err = r.fetch(f)
			}
			f.outcome.note(err, r.plan.excuses(f.request, o.Kill, err))
		})
	}
	all.Wait()
	r.work.Go(r.poison) // while the parent gets the outcomes
	var list []outcome
	for _, f := range r.flights {
		list = append(list, f.outcome)
	}
	return list
}

// poison poisons the blocks of the failed requests of a round, unless bytes may still arrive in
// them. Before that it checks the parts that the request must not have written, which the poison
// hides.
func (r *rank) poison() {
	for _, f := range r.flights {
		if f.tables != nil && f.outcome.Error != "" && !f.outcome.Unproven && !r.streams() {
			r.pools.checkFailed(f.tables, f.request)
			r.pools.watchFailed(r.pools.withoutCached(f.tables, f.request))
		}
	}
}

// note records how a request has ended.
func (o *outcome) note(err error, planned bool) {
	if err == nil {
		return
	}
	o.Error, o.Planned = err.Error(), planned
	var end *handoff.EndError
	o.Damaged = errors.As(err, &end) && !end.Remote && errors.Is(err, layout.ErrMismatch)
	o.Unproven = errors.Is(err, engine.ErrUnproven)
}

// excuses reports whether the plan can cause an error of a request: a rank aborts it or is killed,
// or an injected fault causes it.
func (p *plan) excuses(q *request, kill bool, err error) bool {
	var list []error
	if q.Abort != nil {
		list = append(list, engine.ErrAborted, handoff.ErrCancelled)
	}
	if kill {
		list = append(list, engine.ErrPeerLost)
	}
	var end *handoff.EndError
	if len(p.Faults) > 0 {
		list = append(list, engine.ErrAborted, handoff.ErrCancelled, engine.ErrTimeout,
			engine.ErrPeerLost, engine.ErrRevoked, engine.ErrUnproven)
		if errors.As(err, &end) && end.Remote && end.Reason == handoff.Failed {
			return true // the rank where it happened has the error
		}
	}
	return slices.ContainsFunc(list, func(e error) bool { return errors.Is(err, e) })
}

// push sends this rank's part of a request. With reportHalf it sends kindHalfway after half of the
// layers.
func (r *rank) push(f *flight, reportHalf bool) error {
	began, busy := time.Now(), r.res.Fill+r.base.time()
	for len(r.landed) > 0 { // of an attempt that ended meanwhile
		<-r.landed
	}
	p, err := r.senders[f.DP[1]].Begin(r.ctx, f.id(), f.tables, f.span())
	if err != nil {
		return err
	}
	layers := layersOn(r.side, allRegions)
	for i, l := range layers {
		if reportHalf && i == len(layers)/2 {
			_ = r.c.Send(kindHalfway, nil) // the end of the pipe ends the context
		}
		ends := f.isEndedBy(PrefillSide, r.given.Index, i)
		if r.streams() {
			err = r.stream(p, f, l, !ends)
		} else {
			err = p.Layer(r.ctx, l)
		}
		if err == nil && ends {
			err = p.Abort(r.ctx)
		}
		if err != nil || ends {
			break
		}
	}
	if err == nil && f.Holder == r.given.Index {
		select {
		case <-p.Ended():
		case <-r.ctx.Done():
		}
		err = p.Err()
	} else if err == nil {
		err = p.Finish(r.ctx)
	}
	if end := p.Err(); end != nil || err != nil {
		if end != nil {
			err = end
		}
		return errors.Join(err, p.Abort(r.ctx)) // which has the proof
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.requests.Add(time.Since(began) - (r.res.Fill + r.base.time() - busy))
	return nil
}

// stream fills a layer and hands it over, which begins with its digest. It also copies the same
// bytes by memcpy, as the baseline: before the hand-over in odd layers, after it in even ones. With
// wait it returns when the layer has arrived, since the layer after the next one gets the same
// memory. An Abort proves that, too.
func (r *rank) stream(p *handoff.GroupPush, f *flight, layer int, wait bool) error {
	began := time.Now()
	r.pools.fill(f.tables, f.request, layer, false)
	pieces := r.pools.pieces(f.tables, f.request, layer)
	r.res.Fill += time.Since(began)
	if layer%2 == 1 {
		r.base.run(pieces)
	}
	began = time.Now()
	err := p.Layer(r.ctx, layer)
	r.res.Digest += time.Since(began)
	if err != nil || !wait {
		return err
	}
	select {
	case took := <-r.landed:
		if len(pieces) > 0 { // else the decode side has all blocks already
			r.res.Transfer += took
			for _, b := range pieces {
				r.res.Bytes += uint64(len(b))
			}
		}
	case <-p.Ended():
		return p.Err()
	}
	if layer%2 == 0 {
		r.base.run(pieces)
	}
	r.progress()
	return nil
}

// progress tells the parent that this rank makes progress, at most ten times a second.
func (r *rank) progress() {
	if time.Since(r.said) > 100*time.Millisecond {
		r.said = time.Now()
		_ = r.c.Send(kindProgress, nil) // the end of the pipe ends the context
	}
}

// onLayer counts a layer that was handed over. A goroutine of the push calls it; it does not wait.
func (r *rank) onLayer(l handoff.LayerReport) {
	r.mu.Lock()
	r.layers.Add(l.Took)
	r.mu.Unlock()
	if r.streams() {
		r.landed <- l.Took // has room for all layers of the one push
	}
}

// isEndedBy reports whether the plan wants this rank to abort the request after this layer.
func (q *request) isEndedBy(s Side, rank, layer int) bool {
	return q.Abort != nil && *q.Abort == abort{s, rank, layer}
}

// fetch receives this rank's part of a request.
func (r *rank) fetch(f *flight) error {
	q, err := r.receivers[f.DP[0]].Open(r.ctx, f.id(), f.tables, f.span())
	if err != nil {
		return err
	}
	layer := 0
	for range q.Ready() {
		if f.isEndedBy(DecodeSide, r.given.Index, layer) {
			_ = q.Cancel(r.ctx) // Err says more
		}
		layer++
	}
	<-q.Done()
	return q.Err()
}

// check compares the blocks of the round with what they have to contain, poisons and frees them,
// and returns how many bytes of them were received.
func (r *rank) check() uint64 {
	r.work.Wait()
	before := r.pools.landed
	for _, f := range r.flights {
		switch {
		case f.tables == nil, r.streams():
		case f.outcome.Unproven: // its blocks must not be used again
		case f.outcome.Error != "": // they are poisoned
			r.pools.release(r.pools.withoutCached(f.tables, f.request), true)
		default:
			r.pools.check(f.tables, f.request)
			rest := r.pools.withoutCached(f.tables, f.request)
			if r.plan.Stream {
				rest = r.pools.addToPrefixCache(rest, f.request)
			}
			r.pools.poisonBlocks(rest)
			r.pools.release(rest, false)
		}
	}
	return r.pools.landed - before
}

// finish counts what has leaked. Precondition: no rank sends any more.
func (r *rank) finish() {
	if !r.streams() {
		r.res.Leaked = uint64(r.pools.leaked())
	}
	r.res.Leaked += uint64(r.eng.Stats().Leases)
	r.res.Checked, r.res.Wrong, r.res.First = r.pools.checked, r.pools.wrong, r.pools.first
	r.res.Watched, r.res.Reused = r.pools.watched, r.pools.reused
	r.res.Faults = faultsFired(r.backends)
	r.res.RequestMs = quantiles(r.requests, time.Millisecond)
	r.res.LayerUs = quantiles(r.layers, time.Microsecond)
	if r.base != nil {
		r.res.Memcpy, r.res.MemcpyBytes = r.base.took, r.base.bytes
	}
}

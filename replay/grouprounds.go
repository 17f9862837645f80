// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/handoff"
	"github.com/sluicehq/sluice/kv/layout"
)

// groupFlight is one request of the round on this rank.
type groupFlight struct {
	*groupRequest
	tables  layout.Tables // nil: this rank has no part of it
	outcome groupOutcome
}

// rounds does what the parent says until it is told to finish.
func (r *groupRank) rounds() error {
	for n := 0; ; {
		m, ok := <-r.c.Messages()
		if !ok {
			return errors.New("the parent process ended")
		}
		var answer string
		var body any
		var err error
		switch m.Kind {
		case kindFill:
			if err = m.Decode(&n); err == nil {
				answer, err = kindFilled, r.fill(n)
			}
		case kindRun:
			answer, body = kindEnded, r.run(n)
		case kindCheck:
			answer, body = kindChecked, r.check()
		case kindClose:
			answer, err = kindClosed, r.closeGroup()
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

// fill takes blocks for the requests of a round, and makes the content that they have before.
func (r *groupRank) fill(round int) error {
	r.flights = nil
	for i := range r.told.Plan.Rounds[round] {
		q := &r.told.Plan.Rounds[round][i]
		if !q.in(r.told.Side, r.side) {
			r.flights = append(r.flights, &groupFlight{groupRequest: q})
			continue
		}
		t, err := r.pools.take(q)
		if err != nil {
			return err
		}
		r.pools.fill(t, q, r.told.Side == DecodeSide)
		r.flights = append(r.flights, &groupFlight{groupRequest: q, tables: t})
	}
	return nil
}

// run hands the requests of a round over, all at once. The blocks of those that fail are poisoned
// once all have ended: what is written to them later shows up. Not before: while a lease is being
// revoked, shm may put fresh pages under it, and what the program writes in the same pages at that
// moment is lost (docs/promises.md).
func (r *groupRank) run(round int) []groupOutcome {
	var all sync.WaitGroup
	kill := r.told.Plan.Victim != nil && round == len(r.told.Plan.Rounds)-1
	for i, f := range r.flights {
		all.Go(func() {
			var err error
			switch {
			case f.tables == nil:
			case r.told.Side == PrefillSide:
				err = r.push(f, kill && i == 0 && f.Holder == r.told.Index)
			default:
				err = r.fetch(f)
			}
			f.outcome.note(err, r.told.Plan.excuses(f.groupRequest, kill, err))
		})
	}
	all.Wait()
	r.work.Go(r.poison) // while the parent is told
	var list []groupOutcome
	for _, f := range r.flights {
		list = append(list, f.outcome)
	}
	return list
}

// poison poisons the blocks of the requests of a round that have failed, unless bytes may land in
// them still. First it looks at what no byte may have gone to: poison hides that.
func (r *groupRank) poison() {
	for _, f := range r.flights {
		if f.tables != nil && f.outcome.Error != "" && !f.outcome.Unproven {
			r.pools.checkFailed(f.tables, f.groupRequest)
			r.pools.wipe(f.tables)
		}
	}
}

func (o *groupOutcome) note(err error, planned bool) {
	if err == nil {
		return
	}
	o.Error, o.Planned = err.Error(), planned
	var end *handoff.EndError
	o.Damaged = errors.As(err, &end) && !end.Remote && errors.Is(err, layout.ErrMismatch)
	o.Unproven = errors.Is(err, engine.ErrUnproven)
}

// excuses reports whether a request may fail with an error: because a rank is to end it or is
// killed, or because rules can bring it about.
func (p *groupPlan) excuses(q *groupRequest, kill bool, err error) bool {
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

// push sends this rank's part of a request. poised has it tell the parent half-way.
func (r *groupRank) push(f *groupFlight, poised bool) error {
	p, err := r.senders[f.DP[1]].Begin(r.ctx, f.Number, f.tables, f.span())
	if err != nil {
		return err
	}
	layers := layersOn(r.pools.side)
	for i, l := range layers {
		if poised && i == len(layers)/2 {
			_ = r.c.Send(kindPoised, nil) // the end of the pipe ends the context
		}
		if err = p.Layer(r.ctx, l); err != nil {
			break
		}
		if f.isEndedBy(PrefillSide, r.told.Index, i) {
			err = p.Abort(r.ctx)
			break
		}
	}
	if err == nil && f.Holder == r.told.Index {
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
		err = errors.Join(err, p.Abort(r.ctx)) // which has the proof
	}
	return err
}

// isEndedBy reports whether that is the rank and the layer after which to end the request.
func (q *groupRequest) isEndedBy(s Side, rank, layer int) bool {
	return q.Abort != nil && *q.Abort == groupAbort{s, rank, layer}
}

// fetch receives this rank's part of a request.
func (r *groupRank) fetch(f *groupFlight) error {
	q, err := r.receivers[f.DP[0]].Open(r.ctx, f.Number, f.tables, f.span())
	if err != nil {
		return err
	}
	layer := 0
	for range q.Ready() {
		if f.isEndedBy(DecodeSide, r.told.Index, layer) {
			_ = q.Cancel(r.ctx) // Err says more
		}
		layer++
	}
	<-q.Done()
	return q.Err()
}

// check compares what has come, or was sent, gives the blocks of the round back, and returns how
// many bytes have come.
func (r *groupRank) check() uint64 {
	r.work.Wait()
	before := r.pools.landed
	for _, f := range r.flights {
		failed := f.outcome.Error != ""
		switch {
		case f.tables == nil:
			continue
		case f.outcome.Unproven:
			continue // its blocks must not be used again
		case failed: // they are poisoned
		default:
			r.pools.check(f.tables, f.groupRequest)
			r.pools.wipe(f.tables)
		}
		r.pools.give(f.tables, failed)
	}
	return r.pools.landed - before
}

// finish looks for what is left. Precondition: no rank sends anything any more.
func (r *groupRank) finish() {
	r.res.Leaked = uint64(r.pools.rest() + r.eng.Stats().Leases)
	r.res.Checked, r.res.Wrong, r.res.First = r.pools.checked, r.pools.wrong, r.pools.first
	r.res.Reused, r.res.Faults = r.pools.reused, faultsFired(r.backends)
}

// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// How an initiator that writes all the time learns that the target is no more.
const (
	endSize  = 64 << 10
	endBatch = 16
	endLead  = 300 * time.Millisecond // that operations run before the target's end
	// pairs that are frozen: seconds pass until a side knows, or none does
	frozenAtOnce = 6
)

// killed measures how long a caller takes to know that the target was killed, one after the other:
// that is a matter of milliseconds.
func (r *runner) killed(ctx context.Context) error {
	if r.o.Notice < 0 {
		return nil
	}
	return r.alone(ctx, KindKilled, func(e *entrant) error {
		row, err := r.afterEnd(ctx, e, KindKilled, (*Driver).Kill)
		if err == nil {
			r.report.add(row)
		}
		return err
	})
}

// frozen measures the same of a target that is stopped, some pairs at a time.
func (r *runner) frozen(ctx context.Context) error {
	entrants := slices.DeleteFunc(slices.Clone(r.entrants), func(e *entrant) bool {
		return e.Yardstick || e.failures >= failuresMax
	})
	for some := range slices.Chunk(entrants, frozenAtOnce) {
		if r.until.Sub(r.o.now()) < r.o.Notice {
			for _, e := range some {
				r.report.add(e.failed(KindFrozen, Shape{}, errLate))
			}
			continue
		}
		r.o.Progress(fmt.Sprintf("%s, %d pairs at once", KindFrozen, len(some)))
		rows := make([]Row, len(some))
		var all sync.WaitGroup
		for i, e := range some {
			all.Go(func() {
				var err error
				if rows[i], err = r.afterEnd(ctx, e, KindFrozen, (*Driver).Stop); err != nil {
					rows[i] = e.failed(KindFrozen, Shape{}, err)
				}
			})
		}
		all.Wait()
		if err := ended(ctx); err != nil {
			return err
		}
		r.report.Rows = append(r.report.Rows, rows...)
	}
	return nil
}

// afterEnd opens a pair, has its initiator write, and ends the target.
func (r *runner) afterEnd(ctx context.Context, e *entrant, kind string,
	end func(*Driver)) (Row, error) {
	p, err := OpenPair(ctx, e.Participant, smallMemory, smallMemory, 1)
	if err != nil {
		return Row{}, err
	}
	defer p.Close()
	shape := Shape{Op: OpWrite, Size: endSize, Batch: endBatch, Where: Scattered,
		Spread: smallMemory}
	local, remote := shape.places()
	if _, err := p.ask(ctx, Request{Do: DoPrepare, Op: shape.Op, Size: shape.Size, Local: local,
		Remote: remote}); err != nil {
		return Row{}, err
	}
	if err := p.serve(ctx, true); err != nil {
		return Row{}, err
	}
	if err := p.initiator.Send(Request{Do: DoWatch, NS: int64(r.o.Notice + endLead)},
		askLimit); err != nil {
		return Row{}, err
	}
	select {
	case <-ctx.Done():
		return Row{}, context.Cause(ctx)
	case <-time.After(endLead):
	}
	since := monotonic()
	end(p.target)
	a, err := p.initiator.Await(ctx, DoWatch, r.o.Notice+askLimit)
	if err != nil {
		return Row{}, err
	}
	row := e.row(kind)
	row.Shape, row.Ops, row.Said = shape, a.Ops, a.Text
	switch {
	case a.Noticed:
		row.Seconds = max(float64(a.At-since)/1e9, 0)
	case a.Pending:
		row.Reason = fmt.Sprintf("not noticed within %v: an operation was still said to "+
			"be under way", r.o.Notice)
	default:
		row.Reason = fmt.Sprintf("not noticed within %v: its memory took operations as before "+
			"(one-sided)", r.o.Notice)
	}
	return row, nil
}

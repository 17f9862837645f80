// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// How an initiator that writes all the time learns that the target is no more.
const (
	fateSize  = 64 << 10
	fateBatch = 16
	fateLead  = 300 * time.Millisecond // that operations run before the target's end
	// pairs that are frozen: seconds pass until a side knows, or none does
	fateAtOnce = 6
)

// killed measures how long a caller takes to know that the target was killed, one after the other:
// that is a matter of milliseconds.
func (r *runner) killed(ctx context.Context) error {
	if r.o.Fate < 0 {
		return nil
	}
	return r.alone(ctx, KindKilled, func(s *seat) error {
		row, err := r.fate(ctx, s, KindKilled, (*Driver).Kill)
		if err == nil {
			r.report.add(row)
		}
		return err
	})
}

// frozen measures the same of a target that is stopped, some pairs at a time.
func (r *runner) frozen(ctx context.Context) error {
	seats := slices.DeleteFunc(slices.Clone(r.seats), func(s *seat) bool {
		return s.Yardstick || s.failures >= failuresMax
	})
	for some := range slices.Chunk(seats, fateAtOnce) {
		if r.until.Sub(r.o.now()) < r.o.Fate {
			for _, s := range some {
				r.report.add(s.failed(KindFrozen, Shape{}, errLate))
			}
			continue
		}
		r.o.Progress(fmt.Sprintf("%s, %d pairs at once", KindFrozen, len(some)))
		rows := make([]Row, len(some))
		var all sync.WaitGroup
		for i, s := range some {
			all.Go(func() {
				var err error
				if rows[i], err = r.fate(ctx, s, KindFrozen, (*Driver).Stop); err != nil {
					rows[i] = s.failed(KindFrozen, Shape{}, err)
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

// fate opens a pair, has its initiator write, and ends the target.
func (r *runner) fate(ctx context.Context, s *seat, kind string, end func(*Driver)) (Row, error) {
	p, err := OpenPair(ctx, s.Participant, smallMemory)
	if err != nil {
		return Row{}, err
	}
	defer p.Close()
	shape := Shape{Op: "write", Size: fateSize, Batch: fateBatch}
	local, remote := shape.places(smallMemory)
	if _, err := p.ask(ctx, Request{Do: DoPrepare, Op: shape.Op, Size: shape.Size, Local: local,
		Remote: remote}); err != nil {
		return Row{}, err
	}
	if err := p.serve(ctx, true); err != nil {
		return Row{}, err
	}
	if err := p.initiator.Send(Request{Do: DoFate, NS: int64(r.o.Fate + fateLead)},
		askLimit); err != nil {
		return Row{}, err
	}
	select {
	case <-ctx.Done():
		return Row{}, context.Cause(ctx)
	case <-time.After(fateLead):
	}
	since := monotonic()
	end(p.target)
	a, err := p.initiator.Await(ctx, DoFate, r.o.Fate+askLimit)
	if err != nil {
		return Row{}, err
	}
	row := s.row(kind)
	row.Shape, row.Ops, row.Said = shape, a.Ops, a.Text
	switch {
	case a.Noticed:
		row.Seconds = max(float64(a.At-since)/1e9, 0)
	case a.Pending:
		row.Reason = fmt.Sprintf("not noticed within %v: an operation was still said to "+
			"be under way", r.o.Fate)
	default:
		row.Reason = fmt.Sprintf("not noticed within %v: its memory took operations as before "+
			"(one-sided)", r.o.Fate)
	}
	return row, nil
}

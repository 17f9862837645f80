// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// Options say what is measured and for how long. The zero value of a field means its default.
type Options struct {
	Quick  bool          // fewer shapes and repeats: some minutes
	Rounds int           // of each shape; default 5, quick 3
	Slice  time.Duration // of one participant in one round; default 100 ms
	Memory uint64        // registered at each end; default 512 MiB
	Batch  uint64        // bytes of an operation at most; default half of Memory
	// how long a caller has to notice a dead or frozen peer; default 20 s, quick 16 s; negative:
	// not measured
	Fate time.Duration
	// of the whole run: rounds are cut, then what is left is left out and said; default 20 min,
	// quick 8 min
	Limit time.Duration
	// for which a pair, and the machine before the run, is watched while nothing is asked of it;
	// default 2 s, quick 1 s
	Idle time.Duration
	// Revision of sluice, for the report.
	Revision string
	// Progress is told what begins.
	Progress func(string)

	now func() time.Time // tests have a clock of their own
}

func (o Options) withDefaults() Options {
	def := func(d *int, full, quick int) {
		if *d == 0 {
			if *d = full; o.Quick {
				*d = quick
			}
		}
	}
	def(&o.Rounds, 5, 3)
	if o.Slice == 0 {
		o.Slice = 100 * time.Millisecond
	}
	if o.Memory == 0 {
		o.Memory = 512 << 20
	}
	if o.Batch == 0 {
		o.Batch = o.Memory / 2
	}
	span := func(d *time.Duration, full, quick time.Duration) {
		if *d == 0 {
			if *d = full; o.Quick {
				*d = quick
			}
		}
	}
	span(&o.Fate, 20*time.Second, 16*time.Second)
	span(&o.Idle, 2*time.Second, time.Second)
	span(&o.Limit, 20*time.Minute, 8*time.Minute)
	if o.now == nil {
		o.now = time.Now
	}
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	return o
}

// Run measures the participants, lane by lane, and at last what takes long while it sleeps. A
// participant that fails is no reason to end: the only errors are those of ctx, and what was
// measured until then is in the report all the same.
func Run(ctx context.Context, list []Participant, o Options) (*Report, error) {
	o = o.withDefaults()
	ctx, cancel, end := bounds(ctx, o.now(), o.Limit)
	defer cancel()
	report := newReport(o)
	defer report.end(o.Idle)
	var parts []part
	all := &runner{o: o, report: report}
	for _, lane := range runOrder {
		r := &runner{o: o, report: report}
		for _, p := range list {
			if p.Lane == lane {
				r.seats = append(r.seats, &seat{Participant: p})
			}
		}
		if len(r.seats) == 0 {
			continue
		}
		parts = append(parts, part{laneWeights[lane], r.run})
		if lane != File {
			all.seats = append(all.seats, r.seats...)
		}
	}
	if len(all.seats) > 0 && o.Fate >= 0 {
		parts = append(parts, all.step(frozenWeight, all.frozen))
	}
	return report, inTurn(ctx, o.now, end, parts)
}

// The lanes in the order of the run. Where there is no device for verbs, that lane takes no time:
// it is the first, so that the others have its share.
var (
	runOrder    = []Lane{RDMA, Host, TCP, File}
	laneWeights = map[Lane]float64{RDMA: 4, Host: 4, TCP: 4, File: 1}
)

const frozenWeight = 1.5

// runner measures the participants of one lane.
type runner struct {
	o      Options
	report *Report
	seats  []*seat
	until  time.Time // of the part that runs
	end    time.Time // of the lane
}

// failuresMax is how often a participant may lose a process or a connection on a lane before it is
// out.
const failuresMax = 3

// run measures a lane.
func (r *runner) run(ctx context.Context, until time.Time) error {
	defer r.close()
	r.end = until
	parts := []part{r.step(7, r.open), r.step(65, r.shapes)}
	if r.seats[0].Lane != File { // which has no peer
		parts = append(parts, r.step(1, r.calls), r.step(8, r.handovers), r.step(7, r.pings),
			r.step(1, r.leave),
			r.step(6, r.contacts), r.step(3, r.regions), r.step(4, r.killed))
	}
	return inTurn(ctx, r.o.now, until, parts)
}

// step is a part of a lane.
func (r *runner) step(weight float64, do func(context.Context) error) part {
	return part{weight, func(ctx context.Context, until time.Time) error {
		r.until = until
		return do(ctx)
	}}
}

// late reports whether the part's time is over.
func (r *runner) late() bool { return r.o.now().After(r.until) }

// close ends all pairs at once, since each may take a while.
func (r *runner) close() {
	var all sync.WaitGroup
	for _, s := range r.seats {
		all.Go(s.leave)
	}
	all.Wait()
}

func (r *runner) leave(context.Context) error {
	r.close()
	return nil
}

// open opens all pairs and measures what each takes of processors while nothing is asked of it.
func (r *runner) open(ctx context.Context) error {
	for _, s := range r.seats {
		r.o.Progress(fmt.Sprintf("%s: open %s", s.Lane, s.Name))
		if r.o.now().After(r.end) { // an unopened side is out, so the others' time goes first
			s.failures = failuresMax
			r.report.add(s.failed(KindTransfer, Shape{}, errLate))
			continue
		}
		if err := r.enter(ctx, s); err != nil {
			return err
		}
		if s.pair == nil || s.Yardstick {
			continue
		}
		row := s.row(KindIdle)
		share, err := s.pair.Idle(ctx, r.o.Idle)
		switch {
		case ended(ctx) != nil:
			return ended(ctx)
		case err != nil:
			r.report.add(s.failed(KindIdle, Shape{}, err))
		default:
			row.Share = share
			r.report.add(row)
		}
		s.pair.Rest()
	}
	return nil
}

// enter opens a pair. One that cannot be opened is out, and a row.
func (r *runner) enter(ctx context.Context, s *seat) error {
	pair, err := OpenPair(ctx, s.Participant, s.Lane.memory(&r.o))
	switch {
	case ended(ctx) != nil:
		return ended(ctx)
	case err != nil:
		s.failures = failuresMax
		r.report.add(s.failed(KindTransfer, Shape{}, err))
		return nil
	}
	s.pair = pair
	r.report.know(pair)
	return nil
}

// present are the seats that have a pair.
func (r *runner) present(yardsticks bool) []*seat {
	return slices.DeleteFunc(slices.Clone(r.seats), func(s *seat) bool {
		return s.pair == nil || s.Yardstick && !yardsticks
	})
}

// shapes measures each shape with all participants in alternation: what is behind its time gets
// one round, and what comes after its end none. Those that tell most are the first, so that a
// machine that is slow has some of each size; the report has them in order.
func (r *runner) shapes(ctx context.Context) error {
	list := r.seats[0].Lane.shapes(&r.o)
	defer r.report.order(len(r.report.Rows), slices.Clone(list))
	slices.SortStableFunc(list, tellingFirst)
	begun := r.o.now()
	budget := r.until.Sub(begun)
	for i, shape := range list {
		if len(r.present(true)) == 0 {
			return nil
		}
		rounds := r.o.Rounds
		switch {
		case r.late():
			r.leaveOut(list[i:])
			return nil
		case r.o.now().Sub(begun) > budget*time.Duration(i+1)/time.Duration(len(list)):
			rounds = 1
		}
		r.o.Progress(fmt.Sprintf("%s: %s", r.seats[0].Lane, &shape))
		if err := r.shape(ctx, &shape, uint64(i+1), rounds); err != nil {
			return err
		}
	}
	return nil
}

func (r *runner) leaveOut(list []Shape) {
	for _, shape := range list {
		for _, s := range r.present(true) {
			r.report.add(s.failed(KindTransfer, shape, errLate))
		}
	}
}

func (r *runner) shape(ctx context.Context, shape *Shape, seed uint64, rounds int) error {
	local, remote := shape.places(r.seats[0].Lane.memory(&r.o))
	for _, s := range r.present(true) {
		s.tally, s.reason = tally{}, nil
		if r.late() {
			s.reason = errLate
			continue
		}
		s.turn(func() error { return s.begin(ctx, shape, local, remote, seed, r.o.Slice) })
	}
	for n := range rounds {
		seats := r.present(true)
		for i := range seats {
			s := seats[(i+n)%len(seats)]
			if s.reason != nil || n > 0 && (s.Yardstick || r.late()) {
				continue
			}
			s.turn(func() error { return s.round(ctx, shape, r.o.Slice) })
			if err := ended(ctx); err != nil {
				return err
			}
		}
	}
	for _, s := range r.present(true) {
		if err := r.settle(ctx, s, shape); err != nil {
			return err
		}
	}
	return nil
}

// settle makes the row of a shape, and replaces a pair that has lost a process.
func (r *runner) settle(ctx context.Context, s *seat, shape *Shape) error {
	if s.reason == nil {
		s.turn(func() error {
			_, err := s.pair.ask(ctx, Request{Do: DoDrop})
			return err
		})
	}
	switch {
	case errors.Is(s.reason, errLate):
		r.report.add(s.failed(KindTransfer, *shape, errLate))
		return nil
	case s.reason != nil:
		r.report.add(s.failed(KindTransfer, *shape, s.reason))
		return r.replace(ctx, s)
	}
	row := s.row(KindTransfer)
	row.Shape = *shape
	s.tally.fill(&row)
	r.report.add(row)
	return nil
}

// replace opens a new pair for one of which a process is gone, or the connection, a few times.
func (r *runner) replace(ctx context.Context, s *seat) error {
	s.pair.Wake()
	if s.pair.whole() && s.pair.probe(ctx) == nil {
		s.pair.Rest()
		return nil
	}
	s.leave()
	if s.failures++; s.failures >= failuresMax {
		r.report.add(s.failed(KindTransfer, Shape{}, fmt.Errorf("out, after it lost its "+
			"processes or their connection %d times", s.failures)))
		return nil
	}
	if err := r.enter(ctx, s); err != nil || s.pair == nil {
		return err
	}
	if _, err := s.pair.Idle(ctx, r.o.Idle/2); err != nil && ended(ctx) != nil {
		return ended(ctx)
	}
	s.pair.Rest()
	return nil
}

// whole reports whether both processes live.
func (p *Pair) whole() bool {
	for _, d := range []*Driver{p.target, p.initiator} {
		select {
		case <-d.exited:
			return false
		default:
		}
	}
	return true
}

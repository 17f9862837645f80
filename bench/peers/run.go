// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Options say what is measured and for how long. The zero value of a field means its default.
type Options struct {
	Quick  bool          // fewer shapes and repeats: some minutes
	Rounds int           // of each shape; default 5, quick 3
	Slice  time.Duration // of one participant in one round; default 100 ms
	Memory uint64        // registered at each end; default 512 MiB
	Batch  uint64        // bytes of an operation at most; default half of Memory
	Fate   time.Duration // how long a caller has to notice a dead or frozen peer; default 20 s, quick 16 s; negative: not measured
	Budget time.Duration // for shapes of both lanes: rounds are cut, then shapes left out; default 12 min, quick 4 min
	Idle   time.Duration // for which a pair is watched while nothing is asked of it; default 2 s, quick 1 s
	// Revision of sluice, for the report.
	Revision string
	// Progress is told what begins.
	Progress func(string)
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
	span(&o.Budget, 12*time.Minute, 4*time.Minute)
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	return o
}

// Run measures the participants, lane by lane. A participant that fails is no reason to end: the
// only errors are those of ctx, and what was measured until then is in the report all the same.
func Run(ctx context.Context, list []Participant, o Options) (*Report, error) {
	o = o.withDefaults()
	report := newReport(o)
	defer report.end()
	for _, lane := range []Lane{Host, TCP} {
		r := &runner{o: o, report: report}
		for _, p := range list {
			if p.Lane == lane {
				r.seats = append(r.seats, &seat{Participant: p})
			}
		}
		err := r.run(ctx)
		r.close()
		if err != nil {
			return report, err
		}
	}
	return report, nil
}

// runner measures the participants of one lane.
type runner struct {
	o      Options
	report *Report
	seats  []*seat
}

// seat is a participant and its pair.
type seat struct {
	Participant
	pair     *Pair // nil: it is out, or has not begun
	failures int
	tally    tally
	reason   error // of this shape
}

// failuresMax is how often a participant may lose a process or a connection on a lane before it is out.
const failuresMax = 3

func (r *runner) run(ctx context.Context) error {
	steps := []func(context.Context) error{r.open, r.shapes, r.calls, r.handovers, r.pings, r.leave, r.contacts, r.regions, r.fates}
	for _, step := range steps {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (r *runner) close() {
	for _, s := range r.seats {
		s.leave()
	}
}

func (r *runner) leave(context.Context) error {
	r.close()
	return nil
}

// leave ends the pair.
func (s *seat) leave() {
	if s.pair != nil {
		s.pair.Close()
		s.pair = nil
	}
}

// open opens all pairs and measures what each takes of processors while nothing is asked of it.
func (r *runner) open(ctx context.Context) error {
	for _, s := range r.seats {
		r.o.Progress(fmt.Sprintf("%s: open %s", s.Lane, s.Name))
		if err := r.enter(ctx, s); err != nil {
			return err
		}
		if s.pair == nil || s.Yardstick {
			continue
		}
		row := s.row(KindIdle)
		share, err := s.pair.Idle(ctx, r.o.Idle)
		if err != nil {
			return err
		}
		row.Share = share
		r.report.add(row)
		s.pair.Rest()
	}
	return nil
}

// enter opens a pair. One that cannot be opened is out, and a row.
func (r *runner) enter(ctx context.Context, s *seat) error {
	pair, err := OpenPair(ctx, s.Participant, r.o.Memory)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
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
	return slices.DeleteFunc(slices.Clone(r.seats), func(s *seat) bool { return s.pair == nil || s.Yardstick && !yardsticks })
}

// shapes measures each shape with all participants in alternation, within the lane's half of the
// budget: what is behind its time gets one round, and what comes after its end none.
func (r *runner) shapes(ctx context.Context) error {
	list := Shapes(r.o.Batch, r.o.Quick)
	begun, budget := time.Now(), r.o.Budget/2
	for i, shape := range list {
		if len(r.present(true)) == 0 {
			return nil
		}
		spent := time.Since(begun)
		rounds := r.o.Rounds
		switch {
		case spent > budget:
			r.late(list[i:])
			return nil
		case spent > budget*time.Duration(i+1)/time.Duration(len(list)):
			rounds = 1
		}
		r.o.Progress(fmt.Sprintf("%s: %s", r.seats[0].Lane, &shape))
		if err := r.shape(ctx, &shape, uint64(i+1), rounds); err != nil {
			return err
		}
	}
	return nil
}

// errLate is the reason of what there was no time for.
var errLate = errors.New("left out: the time for shapes was over")

func (r *runner) late(list []Shape) {
	for _, shape := range list {
		for _, s := range r.present(true) {
			r.report.add(s.failed(KindTransfer, shape, errLate))
		}
	}
}

func (r *runner) shape(ctx context.Context, shape *Shape, seed uint64, rounds int) error {
	local, remote := shape.places(r.o.Memory)
	for _, s := range r.present(true) {
		s.tally, s.reason = tally{}, nil
		s.turn(func() error { return s.begin(ctx, shape, local, remote, seed, r.o.Slice) })
	}
	for n := range rounds {
		seats := r.present(true)
		for i := range seats {
			s := seats[(i+n)%len(seats)]
			if s.reason != nil || s.Yardstick && n > 0 {
				continue
			}
			s.turn(func() error { return s.round(ctx, shape, r.o.Slice) })
			if ctx.Err() != nil {
				return context.Cause(ctx)
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

// turn has a participant do something while those rest that would disturb.
func (s *seat) turn(do func() error) {
	s.pair.Wake()
	if err := do(); err != nil {
		s.reason = err
	}
	s.pair.Rest()
}

// begin prepares a shape, proves that it moves bytes, and warms up.
func (s *seat) begin(ctx context.Context, shape *Shape, local, remote [][]int32, seed uint64, slice time.Duration) error {
	if _, err := s.pair.ask(ctx, Request{Do: DoPrepare, Op: shape.Op, Size: shape.Size, Local: local, Remote: remote}); err != nil {
		return err
	}
	if s.Yardstick {
		return nil
	}
	if err := s.pair.check(ctx, shape, local[0], remote[0], seed); err != nil {
		return err
	}
	_, err := s.work(ctx, slice/2)
	return err
}

// work lets the initiator work for so long.
func (s *seat) work(ctx context.Context, slice time.Duration) (Answer, error) {
	if err := s.pair.serve(ctx, true); err != nil {
		return Answer{}, err
	}
	a, err := s.pair.ask(ctx, Request{Do: DoGo, NS: int64(slice), Least: 1})
	if err == nil && (a.Ops < 1 || a.NS < 1 || len(a.Samples) < 1) {
		err = fmt.Errorf("%s: %d operations in %d ns: %w", s.Name, a.Ops, a.NS, ErrNonsense)
	}
	return a, errors.Join(err, s.pair.serve(ctx, false))
}

func (s *seat) round(ctx context.Context, shape *Shape, slice time.Duration) error {
	before := s.pair.CPU()
	a, err := s.work(ctx, slice)
	if err != nil {
		return err
	}
	s.tally.add(&a, shape.Bytes(), s.pair.CPU()-before)
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
	if s.reason != nil {
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
		r.report.add(s.failed(KindTransfer, Shape{}, fmt.Errorf("out, after it lost its processes or their connection %d times", s.failures)))
		return nil
	}
	if err := r.enter(ctx, s); err != nil || s.pair == nil {
		return err
	}
	if _, err := s.pair.Idle(ctx, r.o.Idle/2); err != nil {
		return err
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

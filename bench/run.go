// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// Options say what Run measures and for how long. The zero value of a field means its default.
type Options struct {
	// Shapes to measure on each lane; nil for a lane: those of the functions Shapes or FileShapes
	Shapes map[Lane][]Shape
	Quick  bool          // only the most important default shapes, and fewer rounds
	Rounds int           // for each shape; default 5, quick 3
	Slice  time.Duration // time of one participant in one round; default 100 ms
	Memory uint64        // bytes at each end that default shapes use; default 512 MiB
	Idles  bool          // measure the CPU time of all idle pairs, not only of possibly greedy ones
	// time limit of the run; default 20 min, quick 8 min. Run first does fewer rounds, and then
	// leaves out shapes, with a row that says so.
	Limit time.Duration
	// how long Run measures an idle pair; default 2 s, quick 1 s
	Idle time.Duration
	// Revision is sluice's revision, for the report.
	Revision string
	// Progress is called with a line of text at each step.
	Progress func(string)

	now func() time.Time // tests set their own clock
}

func (o Options) withDefaults() Options {
	def := func(d *time.Duration, full, quick time.Duration) {
		if *d == 0 {
			if *d = full; o.Quick {
				*d = quick
			}
		}
	}
	if o.Rounds == 0 {
		if o.Rounds = 5; o.Quick {
			o.Rounds = 3
		}
	}
	def(&o.Slice, 100*time.Millisecond, 100*time.Millisecond)
	def(&o.Idle, 2*time.Second, time.Second)
	def(&o.Limit, 20*time.Minute, 8*time.Minute)
	if o.Memory == 0 {
		o.Memory = 512 << 20
	}
	if o.now == nil {
		o.now = time.Now
	}
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	return o
}

// fileMemory bounds the file of the default shapes. Each participant writes a file of its own.
const fileMemory = 256 << 20

// shapes returns the shapes to measure on a lane.
func (o *Options) shapes(l Lane) []Shape {
	switch list := o.Shapes[l]; {
	case list != nil:
		return list
	case l == File:
		return FileShapes(min(o.Memory, fileMemory), o.Quick)
	}
	return Shapes(o.Memory, o.Quick)
}

// leastMemory is enough for the first piece and for messages.
const leastMemory = 64 << 10

// ends returns how much memory each end must register for all shapes, and how many goroutines post.
func ends(shapes []Shape) (local, remote uint64, threads int) {
	local, remote, threads = leastMemory, leastMemory, 1
	for i := range shapes {
		here, there := shapes[i].memory()
		local, remote = max(local, here), max(remote, there)
		threads = max(threads, shapes[i].Threads)
	}
	return local, remote, threads
}

// Needs returns how much memory and disk space all participants together need for the shapes.
func Needs(list []Participant, shapes []Shape) (memory, disk uint64) {
	local, remote, _ := ends(shapes)
	for i := range list {
		memory += local
		switch list[i].Lane {
		case CacheShm, CacheTCP: // a cache has room for more than its blocks
			memory += 2 * remote
		case CacheDisk:
			disk += 2 * remote
		case File, Weights, GPUFile:
			disk += remote
		default:
			memory += remote
		}
	}
	return memory, disk
}

// runOrder is the order of the lanes in a run. RDMA is the first: without a device it takes no
// time, and the other lanes get its share.
var runOrder = []Lane{RDMA, Process, Host, TCP, File, Weights, GPU, GPUFile, CacheShm, CacheTCP,
	CacheDisk}

// errLate is the reason in the rows of shapes for which no time was left.
var errLate = errors.New("left out: the time of the run was over")

// reserve: Run begins nothing new in the last 1/reserve of the limit. That time is for measurements
// in progress and for ending the processes.
const reserve = 20

// Run measures the participants, lane by lane. If a participant fails, the run goes on without it.
// The only errors are those of ctx; the report then has what was measured before. At the limit, Run
// kills drivers that hang.
func Run(ctx context.Context, list []Participant, o Options) (*Report, error) {
	o = o.withDefaults()
	ctx, cancel := context.WithTimeoutCause(ctx, o.Limit, errLate)
	defer cancel()
	end := o.now().Add(o.Limit - o.Limit/reserve)
	report := newReport(o)
	defer report.end()
	var lanes []*runner
	for _, lane := range runOrder {
		r := &runner{o: o, report: report}
		for _, p := range list {
			if p.Lane == lane {
				r.entrants = append(r.entrants, &entrant{Participant: p})
			}
		}
		if len(r.entrants) > 0 {
			lanes = append(lanes, r)
		}
	}
	for i, r := range lanes { // time that a lane does not need goes to the next ones
		now := o.now()
		r.end = now.Add(end.Sub(now) / time.Duration(len(lanes)-i))
		if err := r.run(ctx); err != nil {
			return report, err
		}
	}
	return report, nil
}

// ended returns the error of ctx, but nil if only the time limit has passed: the run then goes on,
// to add rows for what it has not measured.
func ended(ctx context.Context) error {
	if err := context.Cause(ctx); err != nil && !errors.Is(err, errLate) {
		return err
	}
	return nil
}

// runner measures the participants of one lane.
type runner struct {
	o        Options
	report   *Report
	entrants []*entrant
	until    time.Time // end of the time for shapes, and then for pings
	end      time.Time // end of the time of the lane
}

// entrant is a participant in a run, with its pair.
type entrant struct {
	Participant
	pair     *Pair // nil: not opened yet, or out of the run
	failures int
	tally    tally
	bytes    uint64 // bytes of one operation, if the driver says it; 0: those of the shape
	reason   error  // why it has no figures for the current shape
}

// failuresMax is how often a participant may lose a process on a lane before it is out.
const failuresMax = 3

// run measures a lane. Once the pairs are open, shapes get nine tenths of the time, pings the rest.
func (r *runner) run(ctx context.Context) error {
	defer r.close()
	if err := r.open(ctx); err != nil {
		return err
	}
	r.until = r.end.Add(-r.end.Sub(r.o.now()) / 10)
	if err := r.shapes(ctx); err != nil || slices.Contains(silent, r.entrants[0].Lane) {
		return err
	}
	r.until = r.end
	return r.pings(ctx)
}

// silent are the lanes without notifications.
var silent = []Lane{File, CacheShm, CacheTCP, CacheDisk}

// late reports whether the time for the current measurements is over.
func (r *runner) late() bool { return r.o.now().After(r.until) }

// close ends all pairs concurrently, since each may take a while.
func (r *runner) close() {
	var all sync.WaitGroup
	for _, e := range r.entrants {
		all.Go(e.leave)
	}
	all.Wait()
}

// leave ends the pair.
func (e *entrant) leave() {
	if e.pair != nil {
		e.pair.Close()
		e.pair = nil
	}
}

// turn runs do while the pair is awake. The other greedy pairs rest.
func (e *entrant) turn(do func() error) {
	e.pair.Wake()
	if err := do(); err != nil {
		e.reason = err
	}
	e.pair.Rest()
}

// open opens all pairs and measures the CPU time of each while it is idle. Without Options.Idles it
// measures only those that may be greedy.
func (r *runner) open(ctx context.Context) error {
	for _, e := range r.entrants {
		r.o.Progress(fmt.Sprintf("%s: open %s", e.Lane, e.Name))
		if r.o.now().After(r.end) { // leave it out, so that the opened pairs are measured
			e.failures = failuresMax
			r.report.add(e.failed(KindTransfer, Shape{}, errLate))
			continue
		}
		if err := r.enter(ctx, e); err != nil {
			return err
		}
		if e.pair == nil || e.Yardstick || !r.o.Idles && e.Ours {
			continue
		}
		row := e.row(KindIdle)
		share, err := e.pair.Idle(ctx, r.o.Idle)
		switch {
		case ended(ctx) != nil:
			return ended(ctx)
		case err != nil:
			r.report.add(e.failed(KindIdle, Shape{}, err))
		default:
			row.Share = share
			r.report.add(row)
		}
		e.pair.Rest()
	}
	return nil
}

// enter opens a pair. If that fails, the participant is out of the run, with a row that says why.
func (r *runner) enter(ctx context.Context, e *entrant) error {
	local, remote, threads := ends(r.o.shapes(e.Lane))
	pair, err := OpenPair(ctx, e.Participant, local, remote, threads)
	switch {
	case ended(ctx) != nil:
		return ended(ctx)
	case err != nil:
		e.failures = failuresMax
		r.report.add(e.failed(KindTransfer, Shape{}, err))
		return nil
	}
	e.pair = pair
	r.report.addPeer(pair)
	return nil
}

// present returns the entrants that have an open pair.
func (r *runner) present() []*entrant {
	return slices.DeleteFunc(slices.Clone(r.entrants), func(e *entrant) bool {
		return e.pair == nil
	})
}

// shapes measures each shape with all participants in alternation. If the run is behind its
// schedule, a shape gets one round only; after the end of the time it gets none.
func (r *runner) shapes(ctx context.Context) error {
	list := r.o.shapes(r.entrants[0].Lane)
	begun := r.o.now()
	budget := r.until.Sub(begun)
	for i, shape := range list {
		if len(r.present()) == 0 {
			return nil
		}
		rounds := r.o.Rounds
		switch {
		case r.late():
			for _, shape := range list[i:] {
				for _, e := range r.present() {
					r.report.add(e.failed(KindTransfer, shape, errLate))
				}
			}
			return nil
		case r.o.now().Sub(begun) > budget*time.Duration(i+1)/time.Duration(len(list)):
			rounds = 1
		}
		r.o.Progress(fmt.Sprintf("%s: %s", r.entrants[0].Lane, &shape))
		if err := r.shape(ctx, &shape, uint64(i+1), rounds); err != nil {
			return err
		}
	}
	return nil
}

func (r *runner) shape(ctx context.Context, shape *Shape, seed uint64, rounds int) error {
	local, remote := shape.places()
	for _, e := range r.present() {
		e.tally, e.reason = tally{}, nil
		if r.late() {
			e.reason = errLate
			continue
		}
		e.turn(func() error { return e.begin(ctx, shape, local, remote, seed, r.o.Slice) })
		if err := ended(ctx); err != nil {
			return err
		}
	}
	for n := range rounds {
		entrants := r.present()
		for i := range entrants {
			e := entrants[(i+n)%len(entrants)]
			if e.reason != nil || n > 0 && (e.Timed || r.late()) {
				continue
			}
			e.turn(func() error { return e.round(ctx, shape, r.o.Slice) })
			if err := ended(ctx); err != nil {
				r.addInterrupted(shape)
				return err
			}
		}
	}
	from := len(r.report.Rows)
	for _, e := range r.present() {
		if err := r.addRow(ctx, e, shape); err != nil {
			return err
		}
	}
	r.report.compare(r.report.Rows[from:])
	return nil
}

// addInterrupted adds the rows of a shape whose rounds were not all measured.
func (r *runner) addInterrupted(shape *Shape) {
	from := len(r.report.Rows)
	for _, e := range r.present() {
		if len(e.tally.rates) > 0 {
			r.report.add(e.measured(shape))
		}
	}
	r.report.compare(r.report.Rows[from:])
}

// begin prepares a shape, proves that it moves bytes, and warms up.
func (e *entrant) begin(ctx context.Context, shape *Shape, local, remote [][]int32, seed uint64,
	slice time.Duration) error {
	a, err := e.pair.ask(ctx, Request{Do: DoPrepare, Op: shape.Op, Size: shape.Size,
		Local: local, Remote: remote})
	if err != nil {
		return err
	}
	if e.bytes = a.Bytes; e.bytes == 0 {
		e.bytes = shape.Bytes()
	}
	if !e.Blind {
		if err := e.pair.check(ctx, shape, local[0], remote[0], seed); err != nil {
			return err
		}
	}
	if err := e.pair.cache(ctx, shape); err != nil || e.Timed {
		return err
	}
	_, err = e.work(ctx, shape, slice/2)
	return err
}

// work lets the initiator post operations for the duration of a slice.
func (e *entrant) work(ctx context.Context, shape *Shape, slice time.Duration) (Answer, error) {
	if err := e.pair.serve(ctx, true); err != nil {
		return Answer{}, err
	}
	a, err := e.pair.ask(ctx, Request{Do: DoGo, NS: int64(slice), Least: 1, Threads: shape.Threads})
	if err == nil && (a.Ops < 1 || a.NS < 1 || len(a.Samples) < 1) {
		err = fmt.Errorf("%s: %d operations in %d ns: %w", e.Name, a.Ops, a.NS, ErrNonsense)
	}
	return a, errors.Join(err, e.pair.serve(ctx, false))
}

func (e *entrant) round(ctx context.Context, shape *Shape, slice time.Duration) error {
	before := e.pair.CPU()
	a, err := e.work(ctx, shape, slice)
	if err != nil {
		return err
	}
	e.tally.add(&a, e.bytes, e.pair.CPU()-before)
	return nil
}

// addRow adds the row of a shape to the report, and replaces a pair that has lost a process.
func (r *runner) addRow(ctx context.Context, e *entrant, shape *Shape) error {
	if e.reason == nil {
		e.turn(func() error {
			_, err := e.pair.ask(ctx, Request{Do: DoDrop})
			return err
		})
	}
	switch {
	case errors.Is(e.reason, errLate):
		r.report.add(e.failed(KindTransfer, *shape, errLate))
		return nil
	case e.reason != nil:
		r.report.add(e.failed(KindTransfer, *shape, e.reason))
		return r.replace(ctx, e)
	}
	r.report.add(e.measured(shape))
	return nil
}

// measured returns the row of a shape, from the rounds that were measured.
func (e *entrant) measured(shape *Shape) Row {
	row := e.row(KindTransfer)
	row.Shape = *shape
	e.tally.fill(&row)
	if e.bytes != shape.Bytes() {
		row.Bytes = e.bytes
	}
	return row
}

// replace opens a new pair if the old one has lost a process, failuresMax times at most.
func (r *runner) replace(ctx context.Context, e *entrant) error {
	e.pair.Wake()
	if e.pair.alive() {
		e.pair.Rest()
		return nil
	}
	e.leave()
	if e.failures++; e.failures >= failuresMax {
		r.report.add(e.failed(KindTransfer, Shape{}, fmt.Errorf("out, after it lost a process "+
			"%d times", e.failures)))
		return nil
	}
	if err := r.enter(ctx, e); err != nil || e.pair == nil {
		return err
	}
	if _, err := e.pair.Idle(ctx, r.o.Idle/2); err != nil && ended(ctx) != nil {
		return ended(ctx)
	}
	e.pair.Rest()
	return nil
}

// The messages of pings.
const (
	pingSize  = 64
	pingCount = 500 // most round trips of one turn
	pingProbe = 20  // round trips of the first turn, which tells how many fit into pingTime
	pingTime  = 2 * time.Second
	pingTurns = 3
)

// pings measures round trips of messages between the pairs that have two processes.
func (r *runner) pings(ctx context.Context) error {
	shape := Shape{Size: pingSize, Batch: 1}
	for _, e := range r.present() {
		if e.Alone || e.Timed {
			continue
		}
		if r.late() {
			r.report.add(e.failed(KindPing, shape, errLate))
			continue
		}
		r.o.Progress(fmt.Sprintf("%s: %s, %s", e.Lane, KindPing, e.Name))
		e.reason = nil
		e.turn(func() error {
			var t tally
			var note string
			count := pingProbe
			for i := range pingTurns + 1 {
				a, took, err := e.pair.ping(ctx, count)
				if err != nil {
					return err
				}
				if i > 0 { // the first turn is the warm-up
					t.add(&a, pingSize, 0)
				}
				note = a.Text
				count = min(max(int(pingTime*time.Duration(count)/max(took, 1)), pingProbe),
					pingCount)
			}
			row := e.row(KindPing)
			row.Shape = shape
			t.fill(&row)
			row.GBps, row.DescsPerS, row.CPUPerGB, row.Note = 0, 0, 0, note
			r.report.add(row)
			return nil
		})
		if err := ended(ctx); err != nil {
			return err
		}
		if e.reason != nil {
			r.report.add(e.failed(KindPing, shape, e.reason))
			if err := r.replace(ctx, e); err != nil {
				return err
			}
		}
	}
	return nil
}

// ping lets the two ends exchange messages for count round trips.
func (p *Pair) ping(ctx context.Context, count int) (a Answer, took time.Duration, err error) {
	begin := time.Now()
	if err := p.target.Send(Request{Do: DoPong, Count: count, Size: pingSize},
		askLimit); err != nil {
		return a, 0, err
	}
	if a, err = p.ask(ctx, Request{Do: DoPing, Count: count, Size: pingSize}); err != nil {
		p.target.Kill() // it waits for messages that never arrive
		return a, 0, err
	}
	_, err = p.target.Await(ctx, DoPong, askLimit)
	return a, time.Since(begin), err
}

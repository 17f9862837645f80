// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// Place says where blocks lie in the memory of a process that serves a model: block k of a call in
// slot Slots[k], which begins at Base + Slots[k]*Stride. A block is the runs of a nest of loops in
// their order: in the cache one lies behind the other.
type Place struct {
	Peer   *engine.Peer   // engine.Self for memory of this process
	Remote *engine.Remote // of that peer
	Base   uint64         // bytes
	Stride uint64         // bytes; below Run slots are units, such as pages: no two blocks overlap
	Slots  []uint32       // of each key; not changed before the operation is done
	Run    uint64         // contiguous bytes
	Loops  []Axis         // outermost first, at most driver.LoopsMax; none: a block is one run
	// Copy: the blocks are for a copy at another node, for which nobody waits. They move as class
	// engine.Replicate, and a Load of them does not count as their use.
	Copy bool
}

// class is that of a transfer to or from the place.
func (p *Place) class(of engine.Class) engine.Class {
	if p.Copy {
		return engine.Replicate
	}
	return of
}

// Axis is N of what is inside it, By bytes apart.
type Axis struct {
	N  uint32
	By uint64
}

// check returns the length of a block, or why the place is no good.
func (p *Place) check(keys int, largest uint64) (size uint32, err error) {
	if p.Peer == nil || p.Remote == nil {
		return 0, errors.New("a place has a peer and a region of it")
	}
	if len(p.Slots) != keys {
		return 0, fmt.Errorf("%d slots for %d keys: %w", len(p.Slots), keys, engine.ErrBounds)
	}
	if len(p.Loops) > driver.LoopsMax {
		return 0, fmt.Errorf("%d loops, at most %d: %w", len(p.Loops), driver.LoopsMax,
			engine.ErrBounds)
	}
	n := p.Run
	for _, a := range p.Loops {
		high, low := bits.Mul64(n, uint64(a.N))
		if n = low; high > 0 {
			n = math.MaxUint64
		}
	}
	if n == 0 || n > largest {
		return 0, fmt.Errorf("blocks of %d bytes: want from 1 to %d, the extent of the cache: %w",
			n, largest, engine.ErrBounds)
	}
	if keys > 1 && p.Stride < p.Run && (p.Stride == 0 || p.overlap()) {
		return 0, fmt.Errorf("slots %d bytes apart (Stride) for runs of %d: they overlap: %w",
			p.Stride, p.Run, engine.ErrBounds)
	}
	return uint32(n), nil
}

// overlap reports whether runs of two slots have a byte in common.
func (p *Place) overlap() bool {
	need := (p.Run + p.Stride - 1) / p.Stride // how many slots a run takes
	inOrder := slices.Sorted(slices.Values(p.Slots))
	for i, slot := range inOrder[1:] {
		if uint64(slot-inOrder[i]) < need {
			return true
		}
	}
	return false
}

// once returns an error where a slot is named twice: two loaded blocks would mix in it.
func (p *Place) once() error {
	if len(p.Slots) < 2 {
		return nil
	}
	twice := func(slot uint32) error {
		return fmt.Errorf("slot %d is there twice: load each block to a slot of its own: %w", slot,
			engine.ErrBounds)
	}
	first := slices.Min(p.Slots)
	if span := int(slices.Max(p.Slots) - first); span <= 64*64*len(p.Slots) {
		seen := make([]uint64, span/64+1) // a fraction of what a sort takes
		for _, slot := range p.Slots {
			word, bit := &seen[(slot-first)/64], uint64(1)<<((slot-first)%64)
			if *word&bit != 0 {
				return twice(slot)
			}
			*word |= bit
		}
		return nil
	}
	inOrder := slices.Clone(p.Slots)
	slices.Sort(inOrder)
	for i, slot := range inOrder[1:] {
		if slot == inOrder[i] {
			return twice(slot)
		}
	}
	return nil
}

// move starts to copy blocks between slots of the cache and those of a place. The cache is the one
// that begins every transfer, so that what it knows of its end is all that keeps a slot from its
// next use: no peer has a key to the cache's memory. slots and theirs must not change before the
// transfer has ended. A transfer that waits for its class's turn does so no longer than ctx.
func (c *Cache) move(ctx context.Context, class engine.Class, op engine.Op, slots, theirs []uint32,
	p *Place, route engine.Route) (*engine.Transfer, error) {
	return c.moveAt(ctx, c.region, class, op, slots, theirs, p, route)
}

// moveAt is move for slots of another memory of this process.
func (c *Cache) moveAt(ctx context.Context, local *engine.Region, class engine.Class, op engine.Op,
	slots, theirs []uint32, p *Place, route engine.Route) (*engine.Transfer, error) {
	t, err := c.cfg.Engine.NewTransfer(p.Peer, op, route)
	if err != nil {
		return nil, err
	}
	pattern := engine.Pattern{Run: p.Run, Count: len(slots),
		Local:  engine.Side{Stride: granule, List: slots},
		Remote: engine.Side{Base: p.Base, Stride: p.Stride, List: theirs}}
	inner := p.Run
	for k := len(p.Loops) - 1; k >= 0; k-- {
		a := p.Loops[k]
		pattern.Loops = append([]driver.Loop{{N: a.N, Local: inner, Remote: a.By}},
			pattern.Loops...)
		inner *= uint64(a.N)
	}
	deadline, _ := ctx.Deadline()
	if err = t.Schedule(class, deadline); err == nil {
		err = t.AddPattern(local, p.Remote, pattern)
	}
	if err == nil {
		err = t.Post()
	}
	if err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return t, nil
}

// finish waits for a transfer, and takes it back when ctx ends first. proved reports whether
// nothing of it moves in memory of this process any more: that is so where Abort says it, and where
// it is the other side that has not answered (engine.ErrUnproven). Where it is not, the caller
// keeps the transfer.
func (c *Cache) finish(ctx context.Context, t *engine.Transfer) (err error, proved bool) {
	if err = t.Wait(ctx); err == nil {
		return t.Close(), true
	}
	soon, cancel := context.WithTimeout(context.Background(), abortLimit)
	defer cancel()
	ended := t.Abort(soon)
	if ended != nil && !errors.Is(ended, engine.ErrUnproven) {
		return errors.Join(err, ended), false
	}
	if outcome := t.Err(); ended == nil && outcome == nil {
		return t.Close(), true // it was done at that moment
	}
	return errors.Join(err, ended, t.Close()), true
}

// abortLimit is how long an operation waits for the proof that a transfer which it has taken back
// has ended. Backends have theirs within engine.Config.AbortGrace, or not soon.
const abortLimit = 5 * time.Second

// keep looks for the proof that finish has not found, and calls after once there is one, or will
// be none: where the engine has given the transfer up what it may still reach is not used again in
// this process, and Close says so. The caller is an operation, or the writer of a disk.
func (c *Cache) keep(t *engine.Transfer, after func(proved bool)) {
	c.stats.unproven.Add(1)
	c.proofs.Go(func() {
		for {
			err := t.Abort(c.life)
			switch {
			case err == nil, errors.Is(err, engine.ErrUnproven):
				_ = t.Close()
				c.stats.unproven.Add(-1)
				after(true)
				return
			case t.Done(), c.life.Err() != nil:
				after(false)
				c.mu.Lock()
				defer c.mu.Unlock()
				c.stuck = append(c.stuck, t)
				return
			}
		}
	})
}

// run has an operation run in a goroutine of its own, where bad is nil and OpsMax run not yet. The
// error is that of the operation, which has ended then. do closes copied.
func (c *Cache) run(ctx context.Context, what string, op *Op, bad error,
	do func(ctx context.Context)) error {
	if bad == nil {
		bad = c.start()
	}
	if bad != nil {
		op.err = fmt.Errorf("%s: %w", what, bad)
		for k := range op.outcomes {
			op.outcomes[k] = Failed
		}
		close(op.copied)
		close(op.done)
		op.written()
		return op.err
	}
	go func() {
		defer c.end()
		ctx, cancel := c.within(ctx)
		defer cancel()
		do(ctx)
		close(op.done)
		op.written()
	}()
	return nil
}

// within returns a context that ends with ctx, and when the cache is closed.
func (c *Cache) within(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(c.life, func() { cancel(engine.ErrClosed) })
	return ctx, func() { stop(); cancel(nil) }
}

// Outcome is what became of one block of an operation.
type Outcome uint8

// The outcomes.
const (
	Undone   Outcome = iota // the operation still runs
	Done                    // the bytes are there
	Known                   // Store: the cache had the block already, which stays
	Missing                 // Load: the cache does not have it
	Pending                 // another operation stores it at this moment
	Damaged                 // Load: its bytes were not what was stored; the cache has forgotten it
	Unlike                  // Load: it has another length
	Conflict                // Store: the cache has the key with another length, or other bytes
	NoRoom                  // no room in memory may be taken; of a Load: and none will be
	Late                    // ctx ended first
	Failed                  // the transfer did: see Err
	Busy                    // Store: the cache cannot keep up: see Err
	outcomesMax
)

var outcomes = [outcomesMax]string{"undone", "done", "known", "missing", "pending", "damaged",
	"unlike", "conflict", "no room", "late", "failed", "busy"}

// String returns a word.
func (o Outcome) String() string { return outcomes[min(int(o), len(outcomes)-1)] }

// MarshalText has JSON know outcomes by their words.
func (o Outcome) MarshalText() ([]byte, error) { return []byte(o.String()), nil }

// UnmarshalText is the reverse of MarshalText.
func (o *Outcome) UnmarshalText(text []byte) error {
	for k, word := range outcomes {
		if word == string(text) {
			*o = Outcome(k)
			return nil
		}
	}
	return fmt.Errorf("%q is no outcome: %w", text, engine.ErrCorrupt)
}

// ErrNoRoom is the error of a call for which the cache has no place.
var ErrNoRoom = errors.New("no room in the cache")

// Op is a load or a store that runs.
type Op struct {
	class                 engine.Class // of what it reads from disks and writes to its place
	copied, done, durable chan struct{}
	outcomes              []Outcome
	err                   error
	fromDisk              bool          // it has waited for a disk
	retries               bool          // it reads itself, once, what another one could not
	replaces              bool          // it is a Replace
	tries                 int           // of a Load: for which it has looked anew, see triesMax
	reads                 []uint32      // entries that a Prefetch reads from disks now, in order
	short                 time.Duration // for which it has had too little room
	// what Durable waits for: itself, and blocks on their way to disks
	left atomic.Int32
}

func newOp(n int) *Op {
	o := &Op{copied: make(chan struct{}), done: make(chan struct{}), durable: make(chan struct{}),
		outcomes: make([]Outcome, n)}
	o.left.Store(1)
	return o
}

// written counts a block out that was on its way to a disk, or the operation itself.
func (o *Op) written() {
	if o != nil && o.left.Add(-1) == 0 {
		close(o.durable)
	}
}

// Durable is closed when no block of a Store is on its way to a disk any more: what the disks took
// is there, as DiskConfig.Durable says; Match tells which those are.
func (o *Op) Durable() <-chan struct{} { return o.durable }

// Done is closed when the operation has ended.
func (o *Op) Done() <-chan struct{} { return o.done }

// Copied is closed when a Store no longer reads its source. A transfer that ended without a proof
// may still: Err is engine.ErrUnproven then, and the source is for its owner to revoke.
func (o *Op) Copied() <-chan struct{} { return o.copied }

// Wait waits for the end and returns Err. ctx ends the wait, not the operation.
func (o *Op) Wait(ctx context.Context) error {
	select {
	case <-o.done:
		return o.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Outcomes says what became of each block. Call it after the end.
func (o *Op) Outcomes() []Outcome { return o.outcomes }

// Err is the first error of a transfer. A block that is missing is none. Call it after the end.
func (o *Op) Err() error { return o.err }

// fail notes an error of blocks that were under way.
func (o *Op) fail(ctx context.Context, err error, which []uint32) {
	as := Failed
	if ctx.Err() != nil || errors.Is(err, engine.ErrExpired) {
		as = Late
	}
	for _, k := range which {
		o.outcomes[k] = as
	}
	if o.err == nil {
		o.err = err
	}
}

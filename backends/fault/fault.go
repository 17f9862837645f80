// SPDX-License-Identifier: Apache-2.0

// Package fault wraps a backend and has it misbehave by rules, so that a program can be tested
// without the hardware that misbehaves, and the tests of this project against a backend that is
// slow, deaf or wrong.
//
//	b, err := fault.Wrap(inner, 7, // the seed
//		fault.Rule{On: fault.Write, Chance: 0.01, Do: fault.Drop()},
//		fault.Rule{On: fault.Batch, Do: fault.Delay(5*time.Millisecond, time.Millisecond)})
//
// Most deeds are within the contract: completions that are late, out of order, or do not come until
// the connection is closed; batches that begin late, fail or are refused; connections that flap.
// Those named Break… break the contract, to test the checks that should notice it. A batch that
// begins late and that the wrapped backend then refuses, as for its bounds, ends with that error.
//
// What is left to chance follows from the seed, the rule and how many batches have matched that
// rule, and from nothing else: the same sequence of calls meets the same faults. The order of
// concurrent calls is not fixed by it.
//
// # How it works
//
// Rules concern batches; without one the wrapped backend is used as it is. Else each batch is a
// flight from Submit until its completion was polled, of which there are at most flightsMax. Submit
// (peer.go) asks the rules for a verdict (rules.go) and submits the batch to the wrapped backend
// now, later or never. Poll takes all completions of the wrapped backend, and holds back those for
// which the verdict says so (flight.go). Timers of the backend submit and complete what is due
// later, and wake a sleeping program through the wrapped backend's own eventfd.
package fault

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/proc"
)

// flightsMax is how many batches of a backend may be under way or not polled.
const flightsMax = 1024

// Backend is a wrapped backend. What rules do not concern goes to the one inside as it is.
type Backend struct {
	driver.Backend // the one inside
	seed           uint64
	rules          []Rule

	wake    *proc.Event // a duplicate of the wrapped backend's
	armed   atomic.Bool
	closing sync.Once
	tasks   sync.WaitGroup // watchers and flaps

	pollAgain       atomic.Bool // Arm must report true once: there may be room again
	completionsOver atomic.Bool // no completion will come any more

	mu           sync.Mutex // guards what follows, flights, and what peers say it guards
	submitEnded  *sync.Cond // broadcast when a flight is no longer submitting
	counts       []count    // one for each rule
	flights      map[uint64]*flight
	internalTags uint64 // tags of internal flights that were given out
	taken        int    // places: flights that the program knows, and completions in ready
	refusedFull  bool   // a Submit found no place
	ready        []driver.Completion
	closed       bool
	peers        map[*peer]struct{}
	flapped      map[string]time.Time // until when no connection is made to an address
	scratch      [64]driver.Completion
}

// Wrap has b misbehave by the rules, with the seed of all that they leave to chance. The result
// owns b: closing it closes b, and b is not to be used beside it. Both ends of a connection may be
// wrapped or only one. The name in Caps is that of b, so that routes and descriptions fit. The
// error is driver.ErrBounds for a rule that makes no sense.
func Wrap(b driver.Backend, seed uint64, rules ...Rule) (*Backend, error) {
	if b == nil {
		return nil, fmt.Errorf("wrap a backend: there is none: %w", driver.ErrBounds)
	}
	for i := range rules {
		if flaw := rules[i].flaw(); flaw != "" {
			return nil, fmt.Errorf("wrap backend %s: rule %d: %s: %w", b.Caps().Name, i+1, flaw,
				driver.ErrBounds)
		}
	}
	wake, err := proc.EventFromFD(b.FD())
	if err != nil {
		return nil, fmt.Errorf("wrap backend %s: %w", b.Caps().Name, err)
	}
	w := &Backend{
		Backend: b, seed: seed, rules: slices.Clone(rules), wake: wake,
		counts: make([]count, len(rules)), flights: map[uint64]*flight{},
		peers: map[*peer]struct{}{}, flapped: map[string]time.Time{},
	}
	w.submitEnded = sync.NewCond(&w.mu)
	return w, nil
}

// Fired returns how many batches each rule has hit, in the order of the rules.
func (b *Backend) Fired() []uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	list := make([]uint64, len(b.counts))
	for i := range b.counts {
		list[i] = b.counts[i].fired
	}
	return list
}

// Connect implements driver.Backend. No connection is made to an address that flaps.
func (b *Backend) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	b.mu.Lock()
	flaps := b.flapped[string(addr)].After(time.Now())
	b.mu.Unlock()
	if flaps {
		return nil, fmt.Errorf("connect: the connection flaps, by a fault rule: %w",
			driver.ErrPeerLost)
	}
	inner, err := b.Backend.Connect(ctx, addr)
	if err != nil || len(b.rules) == 0 {
		return inner, err
	}
	p := &peer{Peer: inner, b: b, addr: string(addr), shutCh: make(chan struct{})}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, errors.Join(driver.ErrClosed, inner.Close())
	}
	b.peers[p] = struct{}{}
	b.tasks.Go(func() { p.watch(inner.Lost()) })
	return p, nil
}

// Poll implements driver.Backend.
func (b *Backend) Poll(done []driver.Completion) (int, error) {
	if len(b.rules) == 0 {
		return b.Backend.Poll(done)
	}
	for {
		ended := b.completionsOver.Load() // before the poll: if that finds none, none will come
		m, err := b.Backend.Poll(b.scratch[:min(len(done), len(b.scratch))])
		b.mu.Lock()
		for _, c := range b.scratch[:m] {
			if f := b.flights[c.Tag]; f != nil {
				f.setOutcome(c.Err)
			}
		}
		n := b.takeReady(done)
		b.mu.Unlock()
		switch {
		case n > 0 || m == 0 && (err == nil || errors.Is(err, driver.ErrClosed) && !ended):
			return n, nil
		case m == 0:
			return 0, err
		}
	}
}

// takeReady moves completions that are ready. Preconditions: b.mu is held.
func (b *Backend) takeReady(done []driver.Completion) int {
	n := copy(done, b.ready)
	b.ready = slices.Delete(b.ready, 0, n)
	b.freePlaces(n)
	return n
}

// freePlaces gives n places back. Preconditions: b.mu is held.
func (b *Backend) freePlaces(n int) {
	if b.taken -= n; n > 0 && b.refusedFull {
		b.refusedFull = false
		b.wakeUp()
	}
}

// deliver makes a completion that Poll returns. Preconditions: b.mu is held.
func (b *Backend) deliver(tag uint64, err error) {
	b.ready = append(b.ready, driver.Completion{Tag: tag, Err: err})
	b.signal()
}

// Arm implements driver.Backend. It sets armed before it looks for completions; deliver and wakeUp
// make theirs visible before they look at armed.
func (b *Backend) Arm() (bool, error) {
	b.armed.Store(true)
	ready, err := b.Backend.Arm()
	b.mu.Lock()
	waits := len(b.ready) > 0
	b.mu.Unlock()
	return ready || waits || b.pollAgain.Swap(false), err
}

// signal wakes the sleeper on the descriptor.
func (b *Backend) signal() {
	if b.armed.CompareAndSwap(true, false) {
		_ = b.wake.Signal() // fails only when closed: nothing sleeps any more
	}
}

// wakeUp makes a program that sleeps, or is about to, poll again.
func (b *Backend) wakeUp() {
	b.pollAgain.Store(true)
	b.signal()
}

// Close implements driver.Backend. It releases all flights first: what then remains is for the
// wrapped backend to end.
func (b *Backend) Close() (err error) {
	b.closing.Do(func() {
		b.mu.Lock()
		b.closed = true
		peers := slices.Collect(maps.Keys(b.peers))
		for _, p := range peers {
			p.end(driver.ErrClosed)
		}
		b.mu.Unlock()
		err = b.Backend.Close()
		for _, p := range peers {
			p.awaitSubmits()
		}
		b.tasks.Wait()
		b.completionsOver.Store(true)
		b.signal()
		_ = b.wake.Close()
	})
	return err
}

// SPDX-License-Identifier: Apache-2.0

// Package fault wraps a backend and has it misbehave by rules, so that a program can be
// tested without the hardware that misbehaves, and the tests of this project against a
// backend that is slow, deaf or wrong.
//
//	b, err := fault.Wrap(inner, 7,
//		fault.Rule{On: fault.Write, Chance: 0.01, Do: fault.Drop()},
//		fault.Rule{On: fault.Batch, Do: fault.Delay(5*time.Millisecond, time.Millisecond)})
//
// Most deeds are within the contract: completions that are late, out of order or do not
// come until the connection is closed, batches that fail or are refused, connections that
// flap, rates and latencies. Those that break it (Break…) are for the tests of what
// should notice.
//
// What is left to chance follows from the seed, the rule and how many events have matched
// that rule, and from nothing else: the same sequence of calls meets the same faults.
// The order of concurrent calls is of course the clock's.
//
// # How it works
//
// A batch that no rule hits goes straight to the wrapped backend. One that is hit is a
// flight: it takes one of flightsMax places, none free is ErrFull. A flight may wait
// before it is handed on, or be held back when it is done; one goroutine for each backend,
// with a heap of moments, does what is due. It wakes the sleeper through the wrapped
// backend's own eventfd. Nothing is allocated for a flight once its place has been used.
//
// A wrapped Peer takes what the one inside takes (Peer.Can).
package fault

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/proc"
)

// flightsMax is how many batches of a backend may be held up at once. Messages that have
// come in and are held back have as many places again.
const flightsMax = 1024

// Hit counts the events of one rule.
type Hit struct {
	Matched uint64 // whether it fired or not
	Fired   uint64
}

// Backend is a wrapped backend. What rules do not concern goes to the one inside as it is.
type Backend struct {
	driver.Backend // the one inside
	caps           driver.Caps
	seed           uint64
	rules          []Rule
	odds           []odds // one for each rule
	about          Event  // what any rule is about
	landsLate      bool   // some rule does, also in memory that is revoked by then
	flaps          bool   // some rule does, so the end of any batch may have to be explained

	wake    *proc.Event // a duplicate of the wrapped backend's
	armed   atomic.Bool
	news    atomic.Bool  // there may be room again
	starved atomic.Bool  // a Submit found no place
	held    atomic.Int64 // flights and extra completions: Poll has something of ours to look after
	closed  atomic.Bool
	ended   atomic.Bool // and no flight is in hand any more
	closing sync.Once
	tasks   sync.WaitGroup // the scheduler, watchers and flaps

	clock  clock
	inbox  inbox
	pollMu sync.Mutex // before mu: held while the wrapped backend is polled

	mu      sync.Mutex // guards what follows, flights, and what peers say it guards
	handed  *sync.Cond // a flight is no longer handed on
	flights map[uint64]*flight
	free    []*flight // the last used on top
	places  int       // flights, and completions in ready
	ready   []driver.Completion
	hidden  uint64 // tags of our own
	peers   map[*peer]struct{}
	numbers uint64            // of connections
	locals  map[uint32]extent // by key
	refused map[string]time.Time
}

// Wrap has b misbehave by the rules, with the seed of all that they leave to chance. The result
// owns b: closing it closes b, and b is not to be used beside it. Both ends of a connection may be
// wrapped or only one. The name in Caps is that of b, so that routes and descriptions fit.
func Wrap(b driver.Backend, seed uint64, rules ...Rule) (*Backend, error) {
	if b == nil {
		return nil, fmt.Errorf("wrap a backend: there is none: %w", driver.ErrBounds)
	}
	if err := checkRules(rules); err != nil {
		return nil, fmt.Errorf("wrap backend %s: %w", b.Caps().Name, err)
	}
	w := &Backend{
		Backend: b, caps: b.Caps(),
		seed: seed, rules: append([]Rule(nil), rules...), odds: make([]odds, len(rules)),
		flights: map[uint64]*flight{}, peers: map[*peer]struct{}{},
		locals: map[uint32]extent{}, refused: map[string]time.Time{},
	}
	w.handed = sync.NewCond(&w.mu)
	w.clock.init()
	w.inbox.wake.come = w.wakeUp
	for i := range rules {
		r := &rules[i]
		w.about |= r.On
		w.flaps = w.flaps || r.Do.kind == flap
		w.landsLate = w.landsLate || r.Do.kind == lateWrite
	}
	if w.about&Batch != 0 || w.flaps {
		w.about |= batches
	}
	wake, err := proc.EventFromFD(b.FD())
	if err != nil {
		return nil, fmt.Errorf("wrap backend %s: %w", w.caps.Name, err)
	}
	w.wake = wake
	if len(rules) > 0 {
		w.tasks.Go(w.schedule)
	}
	return w, nil
}

// Hits returns how often each rule has fired, in their order.
func (b *Backend) Hits() []Hit {
	list := make([]Hit, len(b.odds))
	for i := range b.odds {
		list[i] = Hit{b.odds[i].matched.Load(), b.odds[i].fired.Load()}
	}
	return list
}

// signal wakes the sleeper on the descriptor.
func (b *Backend) signal() {
	if b.armed.CompareAndSwap(true, false) {
		_ = b.wake.Signal() // fails only when closed: nothing sleeps any more
	}
}

// wakeUp has a sleeper, or what is about to sleep, look again.
func (b *Backend) wakeUp() {
	b.news.Store(true)
	b.signal()
}

// Close implements driver.Backend. What is held up ends first, so that the wrapped
// backend has its peers' work alone to end.
func (b *Backend) Close() (err error) {
	b.closing.Do(func() {
		b.mu.Lock()
		b.closed.Store(true)
		peers := make([]*peer, 0, len(b.peers))
		for p := range b.peers {
			peers = append(peers, p)
		}
		b.mu.Unlock()
		for _, p := range peers {
			p.shut(driver.ErrClosed)
		}
		err = b.Backend.Close()
		for _, p := range peers {
			p.awaitHanded()
		}
		b.ended.Store(true)
		b.signal()
		b.clock.stop()
		b.forgetLocals()
		b.tasks.Wait()
		_ = b.wake.Close()
	})
	return err
}

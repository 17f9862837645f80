// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
)

// Receive moves messages that are there into dst and returns how many. It never
// blocks: it is for a goroutine that spins, and takes from the same stream as
// Notifications. A goroutine parked on the channel meanwhile may learn of a
// message up to a millisecond late.
func (e *Engine) Receive(dst []Notification) (n int) {
	for _, l := range e.lanes {
		if !l.notifies() || n == len(dst) {
			continue
		}
		l.spins.Add(1)
		asked := l.received.Load()
		if !l.receiveMu.TryLock() {
			continue // the progress goroutine delivers right now
		}
		n += e.drain(dst[n:]) // what the channel has is older
		if !l.delivering && n < len(dst) {
			got, _ := l.b.Receive(l.messages[:min(len(dst)-n, len(l.messages))])
			for i := range got {
				var ok bool
				if dst[n], ok = l.take(&l.messages[i]); ok {
					n++
				}
			}
		}
		l.receiveMu.Unlock()
		if l.received.Load() != asked {
			l.receive() // for the goroutine that found the lock taken
		}
	}
	return n
}

func (e *Engine) drain(dst []Notification) (n int) {
	for n < len(dst) {
		select {
		case dst[n] = <-e.inbox:
			n++
		default:
			return n
		}
	}
	return n
}

// Next waits for the next message and returns it. It looks at the backends itself for Config.Spin
// before it sleeps, so that the answer of a quick peer costs no wake-up; where messages keep coming
// later than that, it mostly sleeps at once. A message that is there comes before the end of ctx.
// Next takes from the same stream as Notifications. Any goroutine may call it.
func (e *Engine) Next(ctx context.Context) (Notification, error) {
	var one [1]Notification
	if e.Receive(one[:]) > 0 || ctx.Err() == nil && e.spinForMessage(one[:]) {
		return one[0], nil
	}
	for _, l := range e.lanes {
		l.park()
		defer l.unpark()
	}
	select {
	case n := <-e.inbox: // also where another end has come, too
		return n, nil
	default:
	}
	select {
	case n := <-e.inbox:
		return n, nil
	case <-ctx.Done():
		return Notification{}, ctx.Err()
	case <-e.life.Done():
		return Notification{}, errNextClosed
	}
}

var errNextClosed = fmt.Errorf("await a notification: the engine is closed: %w", ErrClosed)

// spinning says whether it pays to look for messages before a sleep.
type spinning struct {
	misses atomic.Int32 // in a row
	turn   atomic.Uint32
}

// After spinMisses in vain, one wait in spinEvery looks: 20 µs in 16 waits cost nothing.
const (
	spinMisses = 4
	spinEvery  = 16
)

func (s *spinning) pays() bool {
	return s.misses.Load() < spinMisses || s.turn.Add(1)%spinEvery == 0
}

func (s *spinning) tell(hit bool) {
	switch {
	case hit:
		s.misses.Store(0)
	case s.misses.Load() < spinMisses:
		s.misses.Add(1)
	}
}

// spinForMessage looks for a message for Config.Spin, unless all backends ask not to.
func (e *Engine) spinForMessage(one []Notification) bool {
	if e.cfg.Spin <= 0 || !e.spinning.pays() || !slices.ContainsFunc(e.lanes, func(l *lane) bool {
		return l.notifies() && !l.caps.Sleep
	}) {
		return false
	}
	hit := false
	for end := e.now() + e.cfg.Spin; !hit && e.now() < end; {
		if hit = e.Receive(one) > 0; !hit {
			runtime.Gosched()
		}
	}
	e.spinning.tell(hit)
	return hit
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"time"
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

// Next waits for the next message and returns it. While messages come soon it looks at the backends
// itself, for at most nextSpins times Config.Spin, so that the answer of a quick peer costs no
// wake-up; else it sleeps at once. A message that is there comes before the end of ctx. Next takes
// from the same stream as Notifications. Any goroutine may call it.
func (e *Engine) Next(ctx context.Context) (Notification, error) {
	var one [1]Notification
	if e.Receive(one[:]) > 0 {
		return one[0], nil
	}
	select {
	case n := <-e.inbox: // which another goroutine has filled just now
		return n, nil
	default:
	}
	if ctx.Err() != nil {
		return Notification{}, ctx.Err()
	}
	begin := e.now()
	defer func() { e.pace.tell(e.now() - begin) }()
	if e.spinForMessage(one[:]) {
		return one[0], nil
	}
	return e.sleepForMessage(ctx)
}

func (e *Engine) sleepForMessage(ctx context.Context) (Notification, error) {
	for _, l := range e.lanes {
		l.park()
		defer l.unpark()
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

// nextSpins is how many times as long as Wait a goroutine looks for a message: while both sides
// sleep an answer takes two wake-ups, and a shorter look would never meet one.
const nextSpins = 5

// spinForMessage looks for a message, unless waits have been too long of late, or all backends ask
// not to.
func (e *Engine) spinForMessage(one []Notification) bool {
	most := nextSpins * e.cfg.Spin
	if most <= 0 || e.pace.wait() > most || !slices.ContainsFunc(e.lanes, func(l *lane) bool {
		return l.notifies() && !l.caps.Sleep
	}) {
		return false
	}
	for end := e.now() + most; e.now() < end; {
		if e.Receive(one) > 0 {
			return true
		}
		runtime.Gosched()
	}
	return false
}

// pace is how long waits for messages last: a mean of which the last has a quarter.
type pace struct{ mean atomic.Int64 }

// paceMax bounds what one wait counts for, so that some ten short ones outweigh an hour.
const paceMax = time.Millisecond

func (p *pace) wait() time.Duration { return time.Duration(p.mean.Load()) }

// tell adds a wait. Of two goroutines' at once one may be left out.
func (p *pace) tell(d time.Duration) {
	mean := p.mean.Load()
	p.mean.Store(mean + (int64(min(d, paceMax))-mean)/4)
}

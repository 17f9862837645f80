// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/proc"
)

// lane is one backend at work: it reaps completions, delivers messages, and
// sleeps on the backend's descriptor when there is nothing to do.
type lane struct {
	e     *Engine
	index int
	b     driver.Backend
	caps  driver.Caps

	pollMu sync.Mutex // taken by TryLock alone; its holder polls for all
	wanted atomic.Uint64
	done   [64]driver.Completion // guarded by pollMu

	receiveMu  sync.Mutex
	messages   [64]driver.Message // guarded by receiveMu
	received   atomic.Uint64      // calls of receive
	delivering bool               // guarded by receiveMu: a goroutine waits for room in the inbox
	ends
	answers answers
	swapIns atomic.Int64 // that hold lower classes back, for Config.Schedule

	spins   atomic.Uint64
	parked  atomic.Int64
	napping atomic.Bool
	kick    chan struct{} // ends a nap
	wake    *proc.Event   // a duplicate of the backend's FD

	backlogs
}

// messageMin is the longest hello: a backend that carries messages must have room for it.
const messageMin = 512

// notifies reports whether peers of this backend send notifications.
func (l *lane) notifies() bool { return l.caps.MessageMax > 0 }

// close wakes the progress goroutine for the last time; it ends with
// Engine.closing.
func (l *lane) close() {
	if l.wake != nil {
		_ = l.wake.Close()
	}
	l.endNap()
}

// poll reaps all completions that are there. A completion that came to be before
// the call is reaped when it returns or is in the hands of another goroutine:
// a goroutine that does not get the lock has raised wanted, and its holder looks again.
// No lock is held while transfers submit more.
func (l *lane) poll() (found bool) {
	l.wanted.Add(1)
	for l.pollMu.TryLock() {
		want := l.wanted.Load()
		for n := len(l.done); n == len(l.done); found = found || n > 0 {
			n = l.reap()
		}
		l.pollMu.Unlock()
		l.retry()
		if l.wanted.Load() == want {
			return found
		}
	}
	return found
}

// reap takes completions once. It returns how many.
// Preconditions: l.pollMu is held.
func (l *lane) reap() int {
	n, _ := l.b.Poll(l.done[:]) // an error means closed: every completion came before
	for i := range l.done[:n] {
		l.e.finish(l, &l.done[i])
	}
	return n
}

// reaped is poll. It reports whether all is finished that came to be before the call: not while
// another goroutine has some in hand.
func (l *lane) reaped() bool {
	if !l.pollMu.TryLock() {
		return false
	}
	for l.reap() == len(l.done) {
	}
	l.pollMu.Unlock()
	l.poll() // for the goroutines that found the lock taken
	return true
}

// handOver is poll and receive for a goroutine of a driver.Reaper, which has a connection to read.
// Where others bring more without end, or posts wait for room, it reports that some is left.
func (l *lane) handOver() (more bool) {
	l.wanted.Add(1)
	for round := 0; l.pollMu.TryLock(); round++ {
		want := l.wanted.Load()
		n := l.reap()
		l.pollMu.Unlock()
		if n < len(l.done) && l.wanted.Load() == want {
			break
		}
		if round == handOverMax {
			return true // the progress goroutine receives, too
		}
	}
	_, more = l.receiveFor(handOverMax)
	return more || l.someBlocked.Load()
}

// handOverMax is how many rounds a goroutine that reads makes for others.
const handOverMax = 4

const (
	napTime   = time.Millisecond // how long we leave polling to goroutines that spin
	readyMiss = 2                // times that Arm may say ready and nothing is found
)

// serve is the progress goroutine.
func (l *lane) serve() {
	nap := time.NewTimer(napTime)
	defer nap.Stop()
	var spins uint64
	misses := 0
	for !l.e.isClosing() {
		found := l.poll()
		found = l.receive() || found
		l.sendAnswers()
		if found {
			misses = 0
			continue
		}
		if s := l.spins.Load(); s != spins {
			spins = s
			l.nap(nap)
			continue
		}
		ready, err := l.b.Arm()
		if err != nil {
			return // closed
		}
		if ready && misses < readyMiss {
			misses++
			continue
		}
		misses = 0
		if l.wake.Wait() != nil {
			return // closed
		}
	}
}

// nap leaves the polling to a goroutine that spins, so that the backend, not
// armed, spends no system call on waking us.
func (l *lane) nap(timer *time.Timer) {
	l.napping.Store(true)
	defer l.napping.Store(false)
	if l.parked.Load() > 0 {
		return
	}
	timer.Reset(napTime)
	select {
	case <-timer.C:
	case <-l.kick:
	case <-l.e.closing:
	}
}

// park and unpark stand around a goroutine's sleep for a transfer of this lane.
func (l *lane) park() {
	l.parked.Add(1)
	if l.napping.Load() {
		l.endNap()
	}
}

func (l *lane) unpark() { l.parked.Add(-1) }

// wakeProgress wakes the progress goroutine, for a reason that the backend does not know of.
func (l *lane) wakeProgress() {
	l.wanted.Add(1)
	if l.wake != nil {
		_ = l.wake.Signal() // fails only when closed: then no goroutine sleeps
	}
	l.endNap()
}

func (l *lane) endNap() {
	select {
	case l.kick <- struct{}{}:
	default:
	}
}

func (e *Engine) isClosing() bool {
	select {
	case <-e.closing:
		return true
	default:
		return false
	}
}

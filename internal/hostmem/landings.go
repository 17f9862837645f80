// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"context"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// landings counts the writes of this process that are under way in a memory, so that no
// Renew moves pages under one. It costs a write two additions to a cache line that
// nothing else touches while no Renew runs.
//
// A Renew that waits holds up what comes, but not for ever: what has entered may be
// unable to leave before another has entered, as in a ring of requests that one goroutine
// both submits and completes. After patience a waiting write goes first. A Renew that has
// begun to move pages depends on no write, so each waits for that.
type landings struct {
	_      [64]byte
	inside atomic.Int64
	phase  atomic.Int32 // of the Renew
	_      [64]byte
	over   atomic.Pointer[chan struct{}] // closed when the Renew has ended
}

// The phases of a Renew. What lands from C knows renewMoves by its value.
const (
	renewNone = iota
	renewWaits
	renewMoves
)

const patience = 10 * time.Millisecond // of a write, with a Renew that waits

var enteredMax = 5 * time.Second // of a Renew, with what has entered; tests have less

// Enter implements driver.Shared.
func (b *Buffer) Enter() { b.landings.Enter() }

// TryEnter implements driver.Shared.
func (b *Buffer) TryEnter() bool { return b.landings.TryEnter() }

// Leave implements driver.Shared.
func (b *Buffer) Leave() { b.landings.Leave() }

// Landings returns the two words behind Enter and Leave, for what lands from C: it adds one to
// inside, and takes it back and tries again while phase is 2.
func (b *Buffer) Landings() (inside *atomic.Int64, phase *atomic.Int32) {
	return &b.landings.inside, &b.landings.phase
}

// Enter waits for a Renew that runs, and holds off the next until Leave.
func (l *landings) Enter() {
	l.inside.Add(1) // pairs with the store of the phase in stop
	if l.phase.Load() == renewNone {
		return
	}
	l.enterLate()
}

// TryEnter is Enter where no Renew waits or runs; else it reports false.
func (l *landings) TryEnter() bool {
	l.inside.Add(1)
	if l.phase.Load() == renewNone {
		return true
	}
	l.inside.Add(-1)
	return false
}

// Leave ends what Enter began.
func (l *landings) Leave() { l.inside.Add(-1) }

// enterLate waits for a Renew.
func (l *landings) enterLate() {
	for {
		l.inside.Add(-1)
		if over := l.over.Load(); over != nil {
			l.await(*over)
		}
		l.inside.Add(1)
		if l.phase.Load() != renewMoves {
			return
		}
	}
}

func (l *landings) await(over chan struct{}) {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-over:
		return
	case <-timer.C:
	}
	if l.phase.Load() == renewMoves {
		<-over
	}
}

// Stop returns when no write is inside, and none enters until Resume. After an error, that of ctx
// or driver.ErrBusy, nothing is stopped. It must not run twice at once.
func (l *landings) Stop(ctx context.Context) error {
	over := make(chan struct{})
	l.over.Store(&over)
	l.phase.Store(renewWaits)
	end := time.Now().Add(enteredMax)
	for pause := time.Microsecond; ; pause = min(2*pause, time.Millisecond) {
		if l.inside.Load() == 0 {
			l.phase.Store(renewMoves)
			if l.inside.Load() == 0 {
				return nil
			}
			l.phase.Store(renewWaits) // one came between the two looks
		}
		var err error
		switch {
		case ctx.Err() != nil:
			err = driver.ContextError(ctx)
		case time.Now().After(end):
			err = fmt.Errorf("a write into it has not ended within %v: %w", enteredMax,
				driver.ErrBusy)
		}
		if err != nil {
			l.Resume()
			return err
		}
		if pause < 50*time.Microsecond {
			runtime.Gosched()
		} else {
			time.Sleep(pause)
		}
	}
}

// Resume ends the Renew for all that wait.
func (l *landings) Resume() {
	l.phase.Store(renewNone)
	close(*l.over.Load())
}

// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/promise"
)

// firstTag has high and low bits set: a backend that keeps a part of a tag, or
// takes one for a pointer or an index, is found out.
const firstTag = 0xfedc_ba98_0000_0001

// errLate says that a wait reached the harness's limit.
var errLate = errors.New("nothing happened within the limit")

// ledger is the one poller of a backend. It knows every tag and its fate, and
// notes whatever breaks "each accepted tag completes exactly once".
type ledger struct {
	b    driver.Backend
	turn sync.Mutex // held while polling: Poll never runs twice at once
	buf  [64]driver.Completion

	mu     sync.Mutex // guards what follows; taken inside turn
	fates  []fate     // by tag-firstTag
	open   int
	faults []string
}

type fate struct {
	state fateState
	err   error
}

type fateState uint8

const (
	inFlight fateState = iota
	refused
	completed
)

// tag opens a new tag. It comes before Submit: the completion may be there
// before Submit returns.
func (l *ledger) tag() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fates = append(l.fates, fate{})
	l.open++
	return firstTag + uint64(len(l.fates)-1)
}

// refuse notes that Submit returned an error for the tag.
func (l *ledger) refuse(tag uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f := &l.fates[tag-firstTag]
	if f.state == completed {
		l.fault("tag %#x completed (%v) although Submit had refused it", tag, f.err)
		return
	}
	f.state = refused
	l.open--
}

func (l *ledger) fault(format string, args ...any) {
	if len(l.faults) < 20 {
		l.faults = append(l.faults, promise.Mark+fmt.Sprintf(format, args...))
	}
}

// poll takes what is ready and returns how much that was.
func (l *ledger) poll() (int, error) {
	l.turn.Lock()
	defer l.turn.Unlock()
	n, err := l.b.Poll(l.buf[:])
	if n < 0 || n > len(l.buf) {
		return 0, fmt.Errorf("Poll returned %d for %d places", n, len(l.buf))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.buf[:n] {
		l.enter(c)
	}
	return n, err
}

func (l *ledger) enter(c driver.Completion) {
	i := c.Tag - firstTag
	if i >= uint64(len(l.fates)) {
		l.fault("a completion (%v) of tag %#x, which was not submitted", c.Err, c.Tag)
		return
	}
	switch f := &l.fates[i]; f.state {
	case completed:
		l.fault("tag %#x completed twice: first %v, then %v", c.Tag, f.err, c.Err)
	case refused:
		l.fault("tag %#x completed (%v) although Submit had refused it", c.Tag, c.Err)
	case inFlight:
		*f = fate{completed, c.Err}
		l.open--
	}
}

// outcome returns whether a tag is done and with what.
func (l *ledger) outcome(tag uint64) (done bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.fates[tag-firstTag]
	return f.state == completed, f.err
}

// outstanding returns how many tags are in flight.
func (l *ledger) outstanding() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.open
}

// await polls until the tag is done and returns its outcome, or errLate.
func (l *ledger) await(tag uint64, limit time.Duration) error {
	var result error
	err := l.until(limit, func() (done bool) {
		done, result = l.outcome(tag)
		return done
	})
	if err != nil {
		return fmt.Errorf("wait for tag %#x: %w", tag, err)
	}
	return result
}

// until polls until the condition holds.
func (l *ledger) until(limit time.Duration, condition func() bool) error {
	for wait := newPatience(limit); ; {
		if condition() {
			return nil
		}
		n, err := l.poll()
		if err != nil {
			if condition() {
				return nil
			}
			return err
		}
		if n == 0 && !wait.more() {
			return errLate
		}
	}
}

// drain polls a closed backend to its end and returns what is wrong with it.
func (l *ledger) drain(limit time.Duration) []string {
	for wait := newPatience(limit); ; {
		n, err := l.poll()
		if errors.Is(err, driver.ErrClosed) {
			break
		}
		if err != nil {
			return []string{fmt.Sprintf("Poll after Close: %v", err)}
		}
		if n == 0 && !wait.more() {
			return []string{"Poll after Close never returned ErrClosed"}
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open > 0 {
		l.fault("%d of %d tags never completed", l.open, len(l.fates))
	}
	return l.faults
}

// patience spins for a moment, then sleeps, until its limit.
type patience struct {
	start, end time.Time
}

func newPatience(limit time.Duration) *patience {
	now := time.Now()
	return &patience{now, now.Add(limit)}
}

// more waits a little and reports whether the limit is still ahead.
func (p *patience) more() bool {
	now := time.Now()
	switch {
	case now.After(p.end):
		return false
	case now.Sub(p.start) < 200*time.Microsecond:
		runtime.Gosched()
	default:
		time.Sleep(20 * time.Microsecond)
	}
	return true
}

// SPDX-License-Identifier: Apache-2.0

package session

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// Gate counts the calls that use something, so that it is given back only when
// none is inside. It costs a call two additions. The zero value is open. All methods
// may be called by any goroutine.
type Gate struct {
	inside atomic.Int64
	closed atomic.Bool
}

// Enter reports whether the caller is in; then it must Exit.
func (g *Gate) Enter() bool {
	g.inside.Add(1) // pairs with the store in Shut
	if g.closed.Load() {
		g.inside.Add(-1)
		return false
	}
	return true
}

// Exit ends what Enter began.
func (g *Gate) Exit() { g.inside.Add(-1) }

// Shut lets no call in any more. It reports whether it was the first to do so.
func (g *Gate) Shut() bool { return !g.closed.Swap(true) }

// Reopen undoes Shut. What was written before it is seen by the calls that get in.
func (g *Gate) Reopen() { g.closed.Store(false) }

// IsShut reports whether no call gets in.
func (g *Gate) IsShut() bool { return g.closed.Load() }

// Wait returns when all are out. Those inside are about to leave: each has been
// told to.
func (g *Gate) Wait() {
	for pause := 10 * time.Microsecond; g.inside.Load() > 0; pause = min(2*pause,
		time.Millisecond) {
		time.Sleep(pause)
	}
}

// Tasks are goroutines that a Close waits for. None starts once it does. The zero
// value is ready.
type Tasks struct {
	mu     sync.Mutex
	closed bool
	group  sync.WaitGroup
}

// Start runs f beside. It reports false when it is too late; then nothing runs.
func (t *Tasks) Start(f func()) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return false
	}
	t.group.Go(f)
	return true
}

// Wait has nothing start any more, and returns when all that runs has ended.
func (t *Tasks) Wait() {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	t.group.Wait()
}

// SetDefault sets a field that is zero.
func SetDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// CheckWithin returns an error where the value of a field is below low or above high: it names the
// field, and wraps driver.ErrBounds.
func CheckWithin(field string, value, low, high int) error {
	if value < low || value > high {
		return fmt.Errorf("config: %s %d is not within %d to %d: %w", field, value, low, high,
			driver.ErrBounds)
	}
	return nil
}

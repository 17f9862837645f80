// SPDX-License-Identifier: Apache-2.0

package session

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// Gate counts the calls that are using something, so that it is released only when none is. A call
// costs two atomic additions. The zero value is open. Any goroutine may call the methods.
type Gate struct {
	inside atomic.Int64
	closed atomic.Bool
}

// Enter reports whether the call may go on. If so, the caller must call Exit at its end.
func (g *Gate) Enter() bool {
	g.inside.Add(1) // pairs with the store in Shut
	if g.closed.Load() {
		g.inside.Add(-1)
		return false
	}
	return true
}

// Exit says that a call has ended.
func (g *Gate) Exit() { g.inside.Add(-1) }

// Shut makes Enter return false from now on. It reports whether it was the first to do so.
func (g *Gate) Shut() bool { return !g.closed.Swap(true) }

// Reopen undoes Shut. Calls that enter then see what was written before Reopen.
func (g *Gate) Reopen() { g.closed.Store(false) }

// IsShut reports whether Enter returns false.
func (g *Gate) IsShut() bool { return g.closed.Load() }

// Wait waits until no call is inside. It polls: the caller has told the calls to end before.
func (g *Gate) Wait() {
	for pause := 10 * time.Microsecond; g.inside.Load() > 0; pause = min(2*pause,
		time.Millisecond) {
		time.Sleep(pause)
	}
}

// Tasks runs goroutines for which a Close waits. The zero value is ready to use.
type Tasks struct {
	mu     sync.Mutex
	closed bool
	group  sync.WaitGroup
}

// Start runs f in a goroutine. After Wait has been called it runs nothing and returns false.
func (t *Tasks) Start(f func()) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return false
	}
	t.group.Go(f)
	return true
}

// Wait makes Start refuse from now on, and waits until all goroutines have ended.
func (t *Tasks) Wait() {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	t.group.Wait()
}

// SetDefault sets a field that is zero to its default.
func SetDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// DefaultSpin returns how long a thread of a C library polls by default before it sleeps: not for
// long where few processors have to serve the other threads, too.
func DefaultSpin() time.Duration {
	if runtime.NumCPU() > 4 {
		return 20 * time.Microsecond
	}
	return 3 * time.Microsecond
}

// CheckWithin returns an error if the value of a field is below low or above high. The error names
// the field and wraps driver.ErrBounds.
func CheckWithin(field string, value, low, high int) error {
	if value < low || value > high {
		return fmt.Errorf("config: %s %d is not within %d to %d: %w", field, value, low, high,
			driver.ErrBounds)
	}
	return nil
}

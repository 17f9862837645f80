// SPDX-License-Identifier: Apache-2.0

package tcp

import "github.com/sluicehq/sluice/driver"

// Poll implements driver.Backend.
func (b *Backend) Poll(done []driver.Completion) (int, error) {
	n := b.done.Pop(done)
	if n == 0 && b.closed.Load() && b.done.Taken() == 0 {
		return 0, driver.ErrClosed
	}
	return n, nil
}

// FD implements driver.Backend.
func (b *Backend) FD() int { return b.event.FD() }

// wake signals the event if it is armed.
func (b *Backend) wake() {
	if b.armed.Load() && b.armed.CompareAndSwap(true, false) {
		_ = b.event.Signal() // fails only when closed: no goroutine sleeps on it any more
	}
}

// alarm is wake for news that no queue holds: room after ErrFull.
func (b *Backend) alarm() {
	b.news.Store(true)
	b.wake()
}

// Arm implements driver.Backend. The flag goes up before the look, and a goroutine that brings
// something looks at the flag afterwards: one of the two sees the other.
func (b *Backend) Arm() (ready bool, err error) {
	if b.closed.Load() {
		return false, driver.ErrClosed
	}
	b.armed.Store(true)
	return b.done.Ready() > 0 || b.inbox.ready.Load() > 0 || b.news.Swap(false), nil
}

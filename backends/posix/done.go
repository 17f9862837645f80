// SPDX-License-Identifier: Apache-2.0

package posix

import "github.com/sluicehq/sluice/driver"

// Poll implements driver.Backend.
func (b *Backend) Poll(done []driver.Completion) (int, error) {
	if b.flights.Gate.Enter() {
		if b.mover.pending() {
			b.serve()
		}
		b.flights.Gate.Exit()
	}
	return b.flights.Pop(done)
}

// FD implements driver.Backend.
func (b *Backend) FD() int { return b.event.FD() }

// Arm implements driver.Backend. The flag goes up before the look, and a goroutine that brings a
// completion looks at the flag afterwards.
func (b *Backend) Arm() (ready bool, err error) {
	if !b.flights.Gate.Enter() {
		return false, driver.ErrClosed
	}
	defer b.flights.Gate.Exit()
	b.flights.Mu.Lock()
	b.armed.Store(true)
	b.armings.Add(1)
	b.doubt.Store(0)
	b.leave()
	return b.flights.Done.Ready() > 0 || b.mover.pending(), nil
}

// wake signals the event if it is armed.
func (b *Backend) wake() {
	if b.armed.Load() && b.armed.CompareAndSwap(true, false) {
		_ = b.event.Signal() // fails only when closed: nothing sleeps any more
	}
}

// SPDX-License-Identifier: Apache-2.0

package gds

import "github.com/sluicehq/sluice/driver"

// Poll implements driver.Backend.
func (b *Backend) Poll(done []driver.Completion) (int, error) {
	if b.flights.Gate.Enter() {
		if b.ends.Pending() {
			b.serve()
		}
		b.flights.Gate.Exit()
	}
	return b.flights.Pop(done)
}

// FD implements driver.Backend.
func (b *Backend) FD() int { return b.event.FD() }

// Arm implements driver.Backend. The flag goes up before the look, and a goroutine that brings a
// completion, or the end of a request that may be one, looks at the flag afterwards.
func (b *Backend) Arm() (ready bool, err error) {
	if !b.flights.Gate.Enter() {
		return false, driver.ErrClosed
	}
	defer b.flights.Gate.Exit()
	return b.ends.Arm() || b.flights.Done.Ready() > 0, nil
}

// wake signals the event if it is armed.
func (b *Backend) wake() {
	if b.ends.Disarm() {
		_ = b.event.Signal() // fails only when closed: nothing sleeps any more
	}
}

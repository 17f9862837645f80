// SPDX-License-Identifier: Apache-2.0

package shm

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
func (b *Backend) FD() int { return b.event }

// wake signals the event if it was armed.
func (b *Backend) wake() {
	if b.armed.Load() && b.armed.CompareAndSwap(true, false) {
		signal(b.event)
	}
}

// Arm implements driver.Backend.
func (b *Backend) Arm() (ready bool, err error) {
	if b.closed.Load() {
		return false, driver.ErrClosed
	}
	b.armed.Store(true) // pairs with the load in wake: the work there is pushed before
	ready = b.done.Ready() > 0
	for _, c := range *b.inbound.Load() {
		if c.arm() {
			ready = true
		}
	}
	for _, p := range *b.peers.Load() {
		if p.arm() {
			ready = true
		}
	}
	return ready, nil
}

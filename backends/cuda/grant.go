// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"sync/atomic"
	"time"
)

// grant is an epoch of a memory, and the batches that use the memory under it.
type grant struct {
	epoch uint64
	users atomic.Int64
	ended atomic.Bool
}

// enter reports whether the caller is in; then it must leave.
func (g *grant) enter() bool {
	g.users.Add(1) // pairs with the store in end
	if g.ended.Load() {
		g.users.Add(-1)
		return false
	}
	return true
}

func (g *grant) leave() { g.users.Add(-1) }

// end lets nobody in any more.
func (g *grant) end() { g.ended.Store(true) }

// quiet reports whether nobody is in.
func (g *grant) quiet() bool { return g.users.Load() == 0 }

// until looks again and again whether a condition holds, and takes ends of batches off the ring
// meanwhile; stop says when to give up. What it waits for is on a stream already.
func (b *Backend) until(holds func() bool, stop func() error) error {
	for pause := 10 * time.Microsecond; ; pause = min(2*pause, time.Millisecond) {
		b.reaping.Lock()
		b.reap()
		b.reaping.Unlock()
		if holds() {
			return nil
		}
		if err := stop(); err != nil {
			return err
		}
		time.Sleep(pause)
	}
}

// always never gives up.
func always() error { return nil }

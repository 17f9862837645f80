// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"math"
	"sync/atomic"
	"time"
)

// grant is permission to use a memory until it is revoked, and the batches that use it.
type grant struct {
	users atomic.Int64
	ended atomic.Bool
	far   *words // of memory of another process; nil: it is this one's
}

// words are what two processes share about an import: the one that uses the memory counts batches,
// the owner says what has become of it.
type words struct {
	users, state *atomic.Uint64
}

// The states of an import. No batch begins under any but the first.
const (
	passGood  = iota
	passOver  // the memory is revoked
	passMoves // other memory comes; what ends before it does counts
	passMoved // it came while a batch was under way, whose bytes are lost
)

// enter reports whether the caller is in; then it must leave.
func (g *grant) enter() bool {
	g.users.Add(1) // pairs with the store in end
	if g.ended.Load() {
		g.users.Add(-1)
		return false
	}
	if g.far == nil {
		return true
	}
	g.far.users.Add(1) // pairs with the store of the owner, which looks at the users afterwards
	parked.At(spotAnnounced)
	if g.far.state.Load() != passGood {
		g.leave()
		return false
	}
	parked.At(spotGood)
	return true
}

func (g *grant) leave() {
	if g.far != nil {
		g.far.users.Add(math.MaxUint64)
	}
	g.users.Add(-1)
}

// overtaken reports whether the bytes of a batch that is in may be lost, since another process has
// taken the memory away.
func (g *grant) overtaken() bool {
	if g.far == nil {
		return false
	}
	state := g.far.state.Load()
	return state == passOver || state == passMoved
}

// end refuses batches from now on.
func (g *grant) end() { g.ended.Store(true) }

// quiet reports whether no batch is in.
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

// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/internal/testpoint"
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
	importGood    = iota
	importRevoked // the memory is revoked
	importMoving  // other memory comes; what ends before it does counts
	importMoved   // it came while a batch was under way, whose bytes are lost
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
	// pairs with the store of the owner, which looks at the users afterwards
	g.far.users.Add(1)
	testpoint.At("cuda: announced") // the batch is counted in the owner's sight
	if g.far.state.Load() != importGood {
		g.leave()
		return false
	}
	testpoint.At("cuda: good") // the import was good after that
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
	return state == importRevoked || state == importMoved
}

// end refuses batches from now on.
func (g *grant) end() { g.ended.Store(true) }

// quiet reports whether no batch is in.
func (g *grant) quiet() bool { return g.users.Load() == 0 }

// untilQuiet is the proof that Revoke waits for: once it returns nil, no batch of any process can
// land in the memory, which was ended before. stop says when to give up.
func (m *memory) untilQuiet(stop func() error) error {
	// Batches of this process end by themselves; their ends are in the rings of their backends.
	senders := append(m.b.sources(), m.b)
	if err := await(func() bool {
		for _, from := range senders {
			from.help()
		}
		return m.theirs.quiet() && m.own.quiet()
	}, stop); err != nil {
		return err
	}

	// Those of other processes (step in of spec/cuda_processes.pml) do as long as the process is
	// well. One that is silent for too long is frozen, or dead: then the memory is taken away.
	in := func() bool { return slices.ContainsFunc(m.b.clients(), m.isUsedBy) }
	deadline := time.Now().Add(m.b.cfg.RevokeGrace)
	err := await(func() bool { return !in() || time.Now().After(deadline) }, stop)
	if err != nil || !in() {
		return err
	}
	if err := m.block.renew(m, stop); err != nil {
		return fmt.Errorf("take memory away from a frozen process: %w", err)
	}
	return nil
}

func (m *memory) isExportedAs(e *export) bool { return e.m == m }
func (m *memory) isUsedBy(g *client) bool     { return g.isIn(m.isExportedAs) }

// patience is how many times the grace the processes get that use another part of a block.
const patience = 5

// renew puts other memory under the addresses, with the same content, so that what frozen processes
// still write by their imports of m lands in memory that nothing uses. Processes that are well map
// the other memory when they next use it; what they have under way is waited for. The driver's part
// has no end that is known: where stop ends the wait for it, it goes on, and the next renew waits
// for it. Its steps have the names of spec/cuda_processes.pml.
func (o *ownBlock) renew(m *memory, stop func() error) error {
	if err := await(o.renewing.TryLock, stop); err != nil {
		return err
	}
	list := openBackends()
	clients := func() (all []*client) {
		for _, b := range list {
			all = append(all, b.clients()...)
		}
		return all
	}
	over := func(e *export) bool { return e.m.block == o }
	well := func(g *client) bool {
		return g.isIn(func(e *export) bool { return over(e) && e.m != m })
	}
	turn := func(from, to uint64) {
		for _, g := range clients() {
			g.eachExport(over, func(slot uint32, _ *export) {
				g.stateOf(slot).CompareAndSwap(from, to)
			})
		}
	}
	if !slices.ContainsFunc(clients(), m.isUsedBy) { // meanwhile
		o.renewing.Unlock()
		return nil
	}

	// moves: no batch begins over the block.
	o.moving.Store(true) // pairs with the look in client.open
	turn(importGood, importMoving)
	// drain: those of this process, and of processes that are well, end.
	deadline := time.Now().Add(patience * m.b.cfg.RevokeGrace)
	if err := await(func() bool {
		for _, b := range list {
			b.help()
		}
		return o.users.Load() == 0 &&
			(!slices.ContainsFunc(clients(), well) || time.Now().After(deadline))
	}, stop); err != nil {
		o.endRenew()
		return err
	}
	// moved: what ends from here on is lost.
	turn(importMoving, importMoved)
	ended := make(chan error, 1)
	go func() {
		// replace, and disown: batches of other processes count no more.
		err := o.replace()
		if err == nil {
			for _, g := range clients() {
				g.eachExport(over, func(_ uint32, e *export) { e.lost = true })
			}
		}
		o.endRenew()
		ended <- err
	}()
	var err error
	if late := await(func() bool {
		select {
		case err = <-ended:
			return true
		default:
			return false
		}
	}, stop); late != nil {
		return late
	}
	return err
}

func (o *ownBlock) replace() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if err := o.block.Renew(); err != nil {
		return err
	}
	o.id = blockIDs.Add(1)
	return nil
}

// endRenew ends a renew: batches may begin again, and what was told to wait is woken.
func (o *ownBlock) endRenew() {
	o.moving.Store(false)
	o.renewing.Unlock()
	for _, b := range openBackends() {
		b.hasRoom()
	}
}

// await looks again and again whether a condition holds; stop says when to give up.
func await(holds func() bool, stop func() error) error {
	for pause := 10 * time.Microsecond; !holds(); pause = min(2*pause, time.Millisecond) {
		if err := stop(); err != nil {
			return err
		}
		time.Sleep(pause)
	}
	return nil
}

// always never gives up.
func always() error { return nil }

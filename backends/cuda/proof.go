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

// grant is permission to use a memory until it is revoked. It counts the batches that use the
// memory.
type grant struct {
	users atomic.Int64 // batches of this process between enter and leave
	ended atomic.Bool
	far   *slotWords // for memory of another process; nil: it belongs to this one
}

// slotWords are the two words of shared memory that belong to an import. The importing process
// counts its batches in users; the owner of the memory writes state.
type slotWords struct {
	users, state *atomic.Uint64
}

// The states of an import. A batch may begin only in importGood.
const (
	importGood    = iota
	importRevoked // the memory is revoked
	importMoving  // renew is about to replace the memory; batches that end in this state succeed
	importMoved   // renew replaces the memory; the bytes of batches that still run are lost
)

// enter counts a batch. It returns false if the grant has ended. Otherwise the batch must leave.
func (g *grant) enter() bool {
	g.users.Add(1) // pairs with the store in end
	if g.ended.Load() {
		g.users.Add(-1)
		return false
	}
	if g.far == nil {
		return true
	}
	// pairs with the owner, which stores the state first and reads users afterwards
	g.far.users.Add(1)
	testpoint.At("cuda: announced") // the owner can see that the batch is counted
	if g.far.state.Load() != importGood {
		g.leave()
		return false
	}
	testpoint.At("cuda: good") // the import was good after the batch was counted
	return true
}

func (g *grant) leave() {
	if g.far != nil {
		g.far.users.Add(math.MaxUint64) // subtracts 1
	}
	g.users.Add(-1)
}

// overtaken reports whether the bytes of a running batch may be lost, because the owner, another
// process, has revoked or replaced the memory.
func (g *grant) overtaken() bool {
	if g.far == nil {
		return false
	}
	state := g.far.state.Load()
	return state == importRevoked || state == importMoved
}

// end makes enter return false from now on.
func (g *grant) end() { g.ended.Store(true) }

// quiet reports whether no batch of this process uses the grant.
func (g *grant) quiet() bool { return g.users.Load() == 0 }

// untilQuiet waits until no batch of any process can use the memory any more; the caller has called
// end before. Revoke relies on this proof. untilQuiet gives up with the error of stop.
func (m *memory) untilQuiet(stop func() error) error {
	// Batches of this process always end. help takes their ends off the rings of their backends.
	senders := append(m.b.sources(), m.b)
	if err := await(func() bool {
		for _, from := range senders {
			from.help()
		}
		return m.remoteGrant.quiet() && m.localGrant.quiet()
	}, stop); err != nil {
		return err
	}

	// Batches of another process (step in of spec/cuda_processes.pml) end while it runs. If they
	// have not ended after RevokeGrace, the process is frozen or dead: renew replaces the memory.
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
func (m *memory) isUsedBy(g *client) bool     { return g.hasBatchesIn(m.isExportedAs) }

// drainGraces is how many times Config.RevokeGrace renew waits for processes that use other parts
// of the block.
const drainGraces = 5

// renew replaces the physical memory under the block's addresses and copies the content. Frozen
// processes still have the old memory mapped, so their late writes through imports of m land in
// memory that nothing uses.
//
// renew first waits for the batches of processes that use other parts of the block; these processes
// map the new memory at their next batch. The CUDA driver's part of the work takes an unknown time:
// when stop returns an error, renew returns while that part goes on in a goroutine, and the next
// renew waits for it. The steps have the names of spec/cuda_processes.pml.
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
	ofBlock := func(e *export) bool { return e.m.block == o }
	usesOthers := func(g *client) bool {
		return g.hasBatchesIn(func(e *export) bool { return ofBlock(e) && e.m != m })
	}
	setStates := func(from, to uint64) {
		for _, g := range clients() {
			g.eachExport(ofBlock, func(slot uint32, _ *export) {
				g.stateOf(slot).CompareAndSwap(from, to)
			})
		}
	}
	if !slices.ContainsFunc(clients(), m.isUsedBy) { // their batches have ended meanwhile
		o.renewing.Unlock()
		return nil
	}

	// moves: from here on no batch begins to use the block.
	o.moving.Store(true) // pairs with the load in client.open
	setStates(importGood, importMoving)
	// drain: the batches of this process, and of processes that use other parts, end.
	deadline := time.Now().Add(drainGraces * m.b.cfg.RevokeGrace)
	if err := await(func() bool {
		for _, b := range list {
			b.help()
		}
		return o.users.Load() == 0 &&
			(!slices.ContainsFunc(clients(), usesOthers) || time.Now().After(deadline))
	}, stop); err != nil {
		o.endRenew()
		return err
	}
	// moved: batches of other processes that end from here on have failed.
	setStates(importMoving, importMoved)
	ended := make(chan error, 1)
	go func() {
		// replace, then disown: Revoke no longer waits for batches of other processes.
		err := o.replace()
		if err == nil {
			for _, g := range clients() {
				g.eachExport(ofBlock, func(_ uint32, e *export) { e.disowned = true })
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

// endRenew lets batches begin again, and wakes the programs whose batches were refused with
// driver.ErrFull.
func (o *ownBlock) endRenew() {
	o.moving.Store(false)
	o.renewing.Unlock()
	for _, b := range openBackends() {
		b.hasRoom()
	}
}

// await polls until holds returns true, or returns the error of stop.
func await(holds func() bool, stop func() error) error {
	for pause := 10 * time.Microsecond; !holds(); pause = min(2*pause, time.Millisecond) {
		if err := stop(); err != nil {
			return err
		}
		time.Sleep(pause)
	}
	return nil
}

// neverStop is a stop for await that never gives up.
func neverStop() error { return nil }

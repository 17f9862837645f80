// SPDX-License-Identifier: Apache-2.0

package main

// #include "faces.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/kv/sparse"
)

// sparsePool is the object of a handle of a pool of entries.
type sparsePool struct {
	of          *openEngine
	p           *sparse.Pool
	entry, sets uint64

	mu     sync.Mutex // guards what follows
	steps  int
	closed bool
}

// sparseStep is the object of a handle of a step. Only one thread at a time may use it: see
// holdStep.
type sparseStep struct {
	pool   *sparsePool
	s      *sparse.Step
	counts []uint32 // for a program that does not want them
	held   atomic.Bool

	wake atomic.Pointer[proc.Event] // nil until the program asks for the descriptor
}

//export slgoSparseOpen
func slgoSparseOpen(c *C.struct_sluice_sparse_config, out *C.uint64_t, slots *C.uint32_t,
	f *C.struct_slgo_fault) C.int {
	r, err := regions.get(uint64(c.region))
	if err != nil {
		return answer(f, err)
	}
	p, err := sparse.New(sparse.Config{
		Engine: r.of.Engine,
		Memory: r.r,
		Base:   uint64(c.base),
		Entry:  uint64(c.entry),
		Stride: uint64(c.stride),
		Sets:   int(c.sets),
		Slots:  int(c.slots),
		Layers: int(c.layers),
	})
	if err != nil {
		return answer(f, err)
	}
	handle, err := adopt(r.of, &pools, &sparsePool{of: r.of, p: p, entry: uint64(c.entry),
		sets: uint64(c.sets)})
	if err != nil {
		return answer(f, err)
	}
	*out, *slots = C.uint64_t(handle), C.uint32_t(p.Slots())
	return C.SLUICE_OK
}

//export slgoSparseReset
func slgoSparseReset(h C.uint64_t, set C.uint32_t, f *C.struct_slgo_fault) C.int {
	p, err := pools.get(uint64(h))
	if err == nil {
		err = p.p.Reset(uint32(set))
	}
	return answer(f, err)
}

//export slgoSparseClose
func slgoSparseClose(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	return give(&pools, h, f, (*sparsePool).close)
}

func (p *sparsePool) close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.steps > 0 {
		return fmt.Errorf("close a pool: it has %d steps: close them first: %w", p.steps,
			engine.ErrBusy)
	}
	p.closed = true
	return nil
}

//export slgoSparseStepNew
func slgoSparseStepNew(h, from C.uint64_t, stride C.uint64_t, route *C.struct_sluice_route,
	out *C.uint64_t, f *C.struct_slgo_fault) C.int {
	p, err := pools.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	m, err := remotes.get(uint64(from))
	if err != nil {
		return answer(f, err)
	}
	by, err := routeOf(route)
	if err != nil {
		return answer(f, err)
	}
	if stride == 0 {
		stride = C.uint64_t(p.entry)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return answer(f, &staleError{want: kindSparse, handle: uint64(h)})
	}
	s, err := p.p.NewStep(m.of.p, m.m, uint64(stride), by)
	if err != nil {
		return answer(f, err)
	}
	handle, err := adopt(p.of, &steps, &sparseStep{pool: p, s: s})
	if err != nil {
		return answer(f, errors.Join(err, s.Close()))
	}
	p.steps++
	*out = C.uint64_t(handle)
	return C.SLUICE_OK
}

var errStepHeld = fmt.Errorf("another thread uses this step just now: %w", engine.ErrBusy)

// holdStep finds a step for a call. The caller calls release at the end. It returns errStepHeld if
// another thread holds the step.
func holdStep(h C.uint64_t) (*sparseStep, error) {
	s, err := steps.get(uint64(h))
	if err != nil {
		return nil, err
	}
	if !s.held.CompareAndSwap(false, true) {
		return nil, errStepHeld
	}
	return s, nil
}

func (s *sparseStep) release() { s.held.Store(false) }

//export slgoSparseLookup
func slgoSparseLookup(h C.uint64_t, b *C.struct_sluice_sparse_batch, count *C.size_t,
	f *C.struct_slgo_fault) C.int {
	s, err := holdStep(h)
	if err != nil {
		return answer(f, err)
	}
	defer s.release()
	defer s.forgetLists()
	entries, err := s.ask(b, 1)
	if err != nil {
		return answer(f, err)
	}
	s.s.Batch.Entries = entries
	missed, err := inPlace[uint32](b.missed, uint64(len(entries)), "sluice_sparse_batch.missed")
	if err != nil {
		return answer(f, err)
	}
	if err := s.s.Lookup(); err != nil {
		return answer(f, err)
	}
	*count = C.size_t(copy(missed, s.s.Misses.Place))
	return C.SLUICE_OK
}

const windowsMax = 1 << 16

//export slgoSparseWarm
func slgoSparseWarm(h C.uint64_t, b *C.struct_sluice_sparse_batch, windows C.size_t,
	count *C.size_t, f *C.struct_slgo_fault) C.int {
	s, err := holdStep(h)
	if err != nil {
		return answer(f, err)
	}
	defer s.release()
	defer s.forgetLists()
	if windows == 0 || windows > windowsMax {
		return answer(f, argument("%d windows, from 1 to %d", windows, windowsMax))
	}
	entries, err := s.ask(b, uint64(windows))
	if err != nil {
		return answer(f, err)
	}
	list, n := make([][]uint32, windows), len(entries)/int(windows)
	for i := range list {
		list[i] = entries[i*n : (i+1)*n]
	}
	if err := s.s.Warm(list...); err != nil {
		return answer(f, err)
	}
	*count = C.size_t(len(s.s.Misses.Slots))
	return C.SLUICE_OK
}

// ask makes a batch of the program's lists, in place, but for the entries of all windows, which it
// returns.
func (s *sparseStep) ask(b *C.struct_sluice_sparse_batch, windows uint64) (entries []uint32,
	err error) {
	sets, per := uint64(b.sets_count), uint64(b.entries_count)
	if sets > s.pool.sets || per > uint64(s.pool.p.Slots()) {
		return nil, fmt.Errorf("look up %d entries in each of %d sets, the pool has %d sets of %d "+
			"slots: %w", per, sets, s.pool.sets, s.pool.p.Slots(), engine.ErrBounds)
	}
	list := func(p *C.uint32_t, n uint64, name string) []uint32 {
		l, e := inPlace[uint32](p, n, name)
		if err == nil {
			err = e
		}
		return l
	}
	s.s.Page = uint64(b.page)
	to := &s.s.Batch
	to.Shift, to.Sets = uint32(b.shift), list(b.sets, sets, "sluice_sparse_batch.sets")
	to.Starts = list(b.starts, sets+1, "sluice_sparse_batch.starts")
	to.Slots = list(b.slots, sets*per, "sluice_sparse_batch.slots")
	if b.counts != nil {
		to.Counts = list(b.counts, sets, "sluice_sparse_batch.counts")
	} else {
		s.counts = slices.Grow(s.counts[:0], int(sets))[:sets]
		to.Counts = s.counts
	}
	entries = list(b.entries, windows*sets*per, "sluice_sparse_batch.entries")
	if err == nil {
		to.Blocks = list(b.blocks, uint64(to.Starts[sets]), "sluice_sparse_batch.blocks")
	}
	return entries, err
}

// forgetLists lets go of the program's lists.
func (s *sparseStep) forgetLists() { s.s.Batch = sparse.Batch{} }

//export slgoSparseFetch
func slgoSparseFetch(h C.uint64_t, bases *C.uint64_t, count C.size_t,
	f *C.struct_slgo_fault) C.int {
	return move(h, bases, count, f, (*sparse.Step).Fetch)
}

//export slgoSparseStore
func slgoSparseStore(h C.uint64_t, bases *C.uint64_t, count C.size_t,
	f *C.struct_slgo_fault) C.int {
	return move(h, bases, count, f, (*sparse.Step).Store)
}

func move(h C.uint64_t, bases *C.uint64_t, count C.size_t, f *C.struct_slgo_fault,
	begin func(s *sparse.Step, bases ...uint64) error) C.int {
	s, err := holdStep(h)
	if err != nil {
		return answer(f, err)
	}
	defer s.release()
	list, err := inPlace[uint64](bases, uint64(count), "bases")
	if err != nil {
		return answer(f, err)
	}
	wake := s.wake.Load()
	if wake != nil {
		wake.Drain()
	}
	err = begin(s.s, list...)
	if wake != nil && s.s.Done() == nil { // nothing is under way
		_ = wake.Signal()
	}
	return answer(f, err)
}

//export slgoSparseFd
func slgoSparseFd(h C.uint64_t, fd *C.int, f *C.struct_slgo_fault) C.int {
	s, err := holdStep(h)
	if err != nil {
		return answer(f, err)
	}
	defer s.release()
	if s.wake.Load() == nil {
		wake, err := proc.NewEvent()
		if err != nil {
			return answer(f, err)
		}
		if err := s.s.OnDone(func() { _ = wake.Signal() }); err != nil {
			return answer(f, errors.Join(err, wake.Close()))
		}
		s.wake.Store(wake)
	}
	*fd = C.int(s.wake.Load().FD())
	return C.SLUICE_OK
}

func (s *sparseStep) closeWake() {
	if wake := s.wake.Load(); wake != nil {
		_ = wake.Close()
	}
}

//export slgoSparseWait
func slgoSparseWait(h C.uint64_t, timeout C.int64_t, f *C.struct_slgo_fault) C.int {
	s, err := holdStep(h)
	if err != nil {
		return answer(f, err)
	}
	defer s.release()
	if timeout < 0 {
		return answer(f, s.s.Wait(context.Background()))
	}
	ctx := past
	if timeout > 0 {
		limit := acquireDeadline(time.Duration(timeout))
		defer limit.release()
		ctx = limit
	}
	err = s.s.Wait(ctx)
	if err == errWaitOver || err == context.DeadlineExceeded {
		return C.SLUICE_PENDING
	}
	return answer(f, err)
}

//export slgoSparseAbort
func slgoSparseAbort(h C.uint64_t, timeout C.int64_t, f *C.struct_slgo_fault) C.int {
	s, err := holdStep(h)
	if err != nil {
		return answer(f, err)
	}
	defer s.release()
	ctx, cancel := within(timeout)
	defer cancel()
	err = s.s.Abort(ctx)
	if err == context.DeadlineExceeded {
		return C.SLUICE_PENDING
	}
	return answer(f, err)
}

//export slgoSparseStepClose
func slgoSparseStepClose(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	s, err := holdStep(h)
	if err != nil {
		return answer(f, err)
	}
	if err = s.s.Close(); err != nil {
		s.release()
	} else if steps.drop(uint64(h)) { // held for ever: another thread may have found it before
		s.closeWake()
		s.pool.mu.Lock()
		s.pool.steps--
		s.pool.mu.Unlock()
	}
	return answer(f, err)
}

// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/ring"
)

// A handle consists of a kind, a generation and an index, from the high bits to the low ones. The
// index is that of a slot in the table of the kind. The generation counts the uses of the slot, so
// that a handle that was dropped does not become valid again before 2^36 further uses.
const (
	indexBits      = 20
	generationBits = 36
	chunkSlots     = 1 << 10
	chunksMax      = 1 << indexBits / chunkSlots
)

// kind is what a handle names.
type kind uint64

const (
	kindEngine kind = iota + 1
	kindMemory
	kindRegion
	kindPeer
	kindRemote
	kindTransfer
	kindLease
	kindListener
	kindKV
	kindKVNamespace
	kindKVOp
	kindHandoff
	kindHandoffRequest
	kindSparse
	kindSparseStep
	kindKVToken
	kindRing
	kindRingReader
	kindRingView
)

var kindNames = [...]string{"", "an engine", "a memory", "a region", "a peer", "a remote",
	"a transfer", "a lease", "a listener", "a cache", "a namespace", "an operation of a cache",
	"a rank of a hand-over", "a request of a hand-over", "a pool",
	"a step of a pool", "a token of a cache", "a ring", "a reader of a ring", "a view of a ring"}

// table finds the objects of one kind by their handles. get takes two atomic loads and no lock.
// Free slots are used again, the one that has been free for the longest time first.
type table[T any] struct {
	kind   kind
	chunks [chunksMax]atomic.Pointer[chunk[T]]

	mu   sync.Mutex // guards what follows
	used int        // slots that were ever used
	free []int      // indices of free slots, in the order in which they became free
}

type chunk[T any] [chunkSlots]slot[T]

type slot[T any] struct {
	entry      atomic.Pointer[entry[T]]
	generation uint64 // guarded by table.mu
}

type entry[T any] struct {
	handle uint64
	value  *T
}

// staleError says that a handle names no object of the wanted kind.
type staleError struct {
	want   kind
	handle uint64
}

func (e *staleError) Error() string {
	_, name, _ := strings.Cut(kindNames[e.want], " ")
	got := e.handle >> (indexBits + generationBits)
	switch {
	case e.handle == 0:
		return fmt.Sprintf("the %s is closed, or was never made", name)
	case got == 0 || got >= uint64(len(kindNames)):
		return fmt.Sprintf("%#x is no handle, where %s is wanted", e.handle, kindNames[e.want])
	case got != uint64(e.want):
		return fmt.Sprintf("%#x is %s, where %s is wanted", e.handle, kindNames[got],
			kindNames[e.want])
	}
	// Objects of these kinds belong to no engine.
	if e.want == kindEngine || e.want == kindMemory || e.want >= kindRing {
		return fmt.Sprintf("the %s was closed", name)
	}
	return fmt.Sprintf("the %s was closed, or its engine was", name)
}

// get returns the object that h names, or a *staleError.
func (t *table[T]) get(h uint64) (*T, error) {
	index := h & (1<<indexBits - 1)
	if c := t.chunks[index/chunkSlots].Load(); c != nil {
		if e := c[index%chunkSlots].entry.Load(); e != nil && e.handle == h {
			return e.value, nil
		}
	}
	return nil, &staleError{want: t.kind, handle: h}
}

// put adds an object and returns its handle. engine.ErrFull: the table has no free slot.
func (t *table[T]) put(v *T) (uint64, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	index := t.used
	switch {
	case len(t.free) > 0:
		index, t.free = t.free[0], t.free[1:]
	case t.used == 1<<indexBits:
		return 0, fmt.Errorf("%d handles of the kind of %s are in use: close some: %w", t.used,
			kindNames[t.kind], engine.ErrFull)
	default:
		t.used++
		if index%chunkSlots == 0 {
			t.chunks[index/chunkSlots].Store(new(chunk[T]))
		}
	}
	s := &t.chunks[index/chunkSlots].Load()[index%chunkSlots]
	s.generation++
	h := uint64(t.kind)<<(indexBits+generationBits) | s.generation&(1<<generationBits-
		1)<<indexBits | uint64(index)
	s.entry.Store(&entry[T]{handle: h, value: v})
	return h, nil
}

// drop removes the object of h, after which get refuses h. It returns false if h names no object.
func (t *table[T]) drop(h uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	index := h & (1<<indexBits - 1)
	c := t.chunks[index/chunkSlots].Load()
	if c == nil {
		return false
	}
	s := &c[index%chunkSlots]
	if e := s.entry.Load(); e == nil || e.handle != h {
		return false
	}
	s.entry.Store(nil)
	t.free = append(t.free, int(index))
	return true
}

// dropAll removes and returns all objects for which match returns true. It calls match under the
// table's lock.
func (t *table[T]) dropAll(match func(*T) bool) (dropped []*T) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for index := range t.used {
		s := &t.chunks[index/chunkSlots].Load()[index%chunkSlots]
		if e := s.entry.Load(); e != nil && match(e.value) {
			s.entry.Store(nil)
			t.free = append(t.free, index)
			dropped = append(dropped, e.value)
		}
	}
	return dropped
}

// The tables are the library's one global state: a handle means the same in all threads.
var (
	engines   = table[openEngine]{kind: kindEngine}
	memories  = table[memory]{kind: kindMemory}
	regions   = table[region]{kind: kindRegion}
	peers     = table[peer]{kind: kindPeer}
	remotes   = table[remote]{kind: kindRemote}
	transfers = table[transfer]{kind: kindTransfer}
	leases    = table[lease]{kind: kindLease}
	listeners = table[listener]{kind: kindListener}
	caches    = table[kv]{kind: kindKV}
	spaces    = table[namespace]{kind: kindKVNamespace}
	kvOps     = table[kvOp]{kind: kindKVOp}
	tokens    = table[kvToken]{kind: kindKVToken}
	handoffs  = table[groupRank]{kind: kindHandoff}
	handed    = table[groupRequest]{kind: kindHandoffRequest}
	pools     = table[sparsePool]{kind: kindSparse}
	steps     = table[sparseStep]{kind: kindSparseStep}
	rings     = table[ring.Writer]{kind: kindRing}
	readers   = table[ring.Reader]{kind: kindRingReader}
	views     = table[ring.View]{kind: kindRingView}
)

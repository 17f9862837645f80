// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sort"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// ownBlock is one allocation of AllocDevice.
type ownBlock struct {
	once    sync.Once
	block   *gpu.Block
	fd      int  // of its dma-buf; -1: none
	peers   bool // other processes may map it
	ordinal int

	users  atomic.Int64 // batches and sums of this process
	moving atomic.Bool  // renew or Close is at work: no batch or sum may begin

	renewing sync.Mutex // held while renew replaces the memory

	mu sync.Mutex // guards id, and block against share and replace at once
	id uint64     // of the memory now under the addresses; unique in this process
}

// blockIDs numbers memory.
var blockIDs atomic.Uint64

// blockTable finds blocks by address.
type blockTable struct {
	mu   sync.RWMutex
	list []*ownBlock // by address
}

// blocks holds the blocks of the whole process, since libcuda is loaded once.
var blocks blockTable

// after returns the index of the first block that begins past an address.
// Preconditions: t.mu is held.
func (t *blockTable) after(at uint64) int {
	return sort.Search(len(t.list), func(i int) bool { return t.list[i].block.At > at })
}

// find returns the block that contains the whole range, or nil.
func (t *blockTable) find(at, n uint64) *ownBlock {
	list := t.under(at, n)
	if len(list) != 1 || at < list[0].block.At || n > list[0].block.Len-(at-list[0].block.At) {
		return nil
	}
	return list[0]
}

// under returns the blocks that overlap the range.
func (t *blockTable) under(at, n uint64) []*ownBlock {
	t.mu.RLock()
	defer t.mu.RUnlock()
	first := t.after(at)
	if first > 0 && at-t.list[first-1].block.At < t.list[first-1].block.Len {
		first--
	}
	last := first
	for last < len(t.list) && t.list[last].block.At-min(at, t.list[last].block.At) < n {
		last++
	}
	return slices.Clone(t.list[first:last])
}

// newOwnBlock allocates a block. Other processes may map it only if no NIC registers it: when
// Revoke replaces the memory because a process is frozen, a NIC would go on with the old memory.
func newOwnBlock(ordinal int, n uint64, peers bool) (*ownBlock, error) {
	block, err := gpu.NewBlock(ordinal, n)
	if err != nil {
		return nil, err
	}
	o := &ownBlock{block: block, fd: -1, peers: peers, ordinal: ordinal, id: blockIDs.Add(1)}
	if peers {
		hostmem.AddLent(block.At, block.Len)
	}
	t := &blocks
	t.mu.Lock()
	t.list = slices.Insert(t.list, t.after(block.At), o)
	t.mu.Unlock()
	return o, nil
}

// Close implements io.Closer. It waits for the batches and sums that have entered.
func (o *ownBlock) Close() (err error) {
	o.once.Do(func() {
		o.renewing.Lock() // renew may still run after its Revoke has returned
		defer o.renewing.Unlock()
		blocks.mu.Lock()
		blocks.list = slices.DeleteFunc(blocks.list, func(p *ownBlock) bool { return p == o })
		blocks.mu.Unlock()
		o.moving.Store(true) // for good: enter fails for callers that found the block before
		_ = await(func() bool { return o.users.Load() == 0 }, neverStop)
		hostmem.RemoveLent(o.block.At)
		err = o.block.Close()
		if o.fd >= 0 {
			err = errors.Join(err, os.NewSyscallError("close", unix.Close(o.fd)))
		}
	})
	return err
}

// enter counts a batch or a sum, which must leave. It returns false while it may not begin. For a
// nil block, that is for memory not from AllocDevice, it always returns true.
func (o *ownBlock) enter() bool {
	if o == nil {
		return true
	}
	o.users.Add(1) // pairs with the stores in renew and Close
	if o.moving.Load() {
		o.users.Add(-1)
		return false
	}
	return true
}

func (o *ownBlock) leave() {
	if o != nil {
		o.users.Add(-1)
	}
}

// AllocDevice returns n bytes of a device's memory, not zeroed, as a segment that every backend for
// HBM can register. Where the driver exports it (CUDA 11.7, and a device that can),
// Segment.DMABuf is set, so that NICs may register it too, without nvidia_peermem. The memory comes
// from the driver's virtual memory management where there is one, in whole pieces of mostly 2 MiB,
// and from its plain allocator elsewhere.
//
// With Config.Peers, backends of other processes can import the memory. If such a process freezes,
// or is killed during a batch, Revoke replaces the physical memory under the addresses. Revoke then
// takes longer than Config.RevokeGrace and waits for all work of the program on the device. While
// it runs, the program must begin no kernel or copy of its own that uses the allocation. The memory
// has no dma-buf, and the backends rdma and gds refuse it, since their devices would go on with the
// old memory.
//
// The Closer frees the memory. Close it after all registrations of the memory; the backend may be
// closed before. Closing it again does nothing.
func (b *Backend) AllocDevice(ordinal int, n uint64) (driver.Segment, io.Closer, error) {
	if n == 0 || n > 1<<60 {
		return driver.Segment{}, nil, fmt.Errorf("allocate %d bytes of device memory: %w", n,
			driver.ErrBounds)
	}
	b.open.RLock()
	defer b.open.RUnlock()
	switch {
	case b.closed.Load():
		return driver.Segment{}, nil, driver.ErrClosed
	case b.device(ordinal) == nil:
		return driver.Segment{}, nil, fmt.Errorf("allocate on device %d, which Config.Devices "+
			"leaves out: %w", ordinal, driver.ErrNotSupported)
	}
	own, err := newOwnBlock(ordinal, n, b.cfg.Peers)
	if err != nil {
		return driver.Segment{}, nil, err
	}
	seg := driver.Segment{Kind: driver.HBM, Len: n, Device: ordinal, Addr: own.block.At}
	if b.cfg.Peers {
		return seg, own, nil
	}
	fd, off, err := own.block.Export()
	if err == nil && fd >= 0 { // without a dma-buf, the memory is usable all the same
		own.fd = fd
		seg.DMABuf = &driver.DMABuf{FD: fd, Offset: off}
	}
	return seg, own, nil
}

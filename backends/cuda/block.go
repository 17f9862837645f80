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

// ownBlock is memory of AllocDevice.
type ownBlock struct {
	once    sync.Once
	block   *gpu.Block
	fd      int  // of its dma-buf; -1: none
	peers   bool // processes beside this one may map it
	ordinal int

	users  atomic.Int64 // batches and sums of this process
	moving atomic.Bool  // other memory goes under the addresses, or none: nothing may begin

	renewing sync.Mutex // held while other memory is put there

	mu sync.Mutex // guards what follows, and the block while it is shared
	id uint64     // of the memory that is there now, of all that this process ever had
}

// blockIDs numbers memory.
var blockIDs atomic.Uint64

// blockTable finds blocks by address.
type blockTable struct {
	mu   sync.RWMutex
	list []*ownBlock // by address
}

// blocks is one for the process, as the driver is.
var blocks blockTable

// after returns the index of the first block that begins past an address.
// Preconditions: t.mu is held.
func (t *blockTable) after(at uint64) int {
	return sort.Search(len(t.list), func(i int) bool { return t.list[i].block.At > at })
}

// find returns the block that has all of a range, nil: none has.
func (t *blockTable) find(at, n uint64) *ownBlock {
	list := t.under(at, n)
	if len(list) != 1 || at < list[0].block.At || n > list[0].block.Len-(at-list[0].block.At) {
		return nil
	}
	return list[0]
}

// under returns the blocks that have a byte of a range.
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

// newOwnBlock allocates. Only what no NIC knows may be mapped by other processes: a NIC holds on to
// the memory that a revoke against a frozen process replaces.
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
		o.renewing.Lock() // a renew may have outlived the Revoke that asked for it
		defer o.renewing.Unlock()
		blocks.mu.Lock()
		blocks.list = slices.DeleteFunc(blocks.list, func(p *ownBlock) bool { return p == o })
		blocks.mu.Unlock()
		o.moving.Store(true) // for good: who found it before does not enter
		_ = await(func() bool { return o.users.Load() == 0 }, always)
		hostmem.RemoveLent(o.block.At)
		err = o.block.Close()
		if o.fd >= 0 {
			err = errors.Join(err, os.NewSyscallError("close", unix.Close(o.fd)))
		}
	})
	return err
}

// enter reports whether a batch or a sum may begin; then it must leave. A block of nil is memory
// from elsewhere.
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

// AllocDevice returns n bytes of a device's memory, not zeroed, as a segment that each backend can
// register which takes HBM. Where the driver exports it (CUDA 11.7, and a device that can),
// Segment.DMABuf is set, so that NICs may register it too, without nvidia_peermem. The memory comes
// from the driver's virtual memory management where there is one, in whole pieces of mostly 2 MiB,
// and from its plain allocator elsewhere.
//
// With Config.Peers backends of other processes reach it; no dma-buf is exported, and the backends
// rdma and gds, whose devices would go on with the old memory, do not take it. A revoke against a
// process that is frozen, or was killed in a batch, then puts other memory under the addresses: it
// waits for what the program has begun on the device, and while it runs (for longer than
// Config.RevokeGrace, that is) the program must begin no kernel or copy of its own over any byte of
// the allocation.
//
// The Closer frees it. It must be closed after every registration of the memory was, at any time,
// also after the backend; closing it again does nothing.
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
	if err == nil && fd >= 0 { // what cannot be exported is memory all the same
		own.fd = fd
		seg.DMABuf = &driver.DMABuf{FD: fd, Offset: off}
	}
	return seg, own, nil
}

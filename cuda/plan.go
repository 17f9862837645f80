// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// Card has the properties of a card that a plan depends on.
type Card struct {
	Compute int    // 10 * major + minor
	Driver  int    // as cuDriverGetVersion answers
	SMs     int    // multiprocessors
	Shared  uint32 // bytes of shared memory that a block may opt in to
}

// check returns an error if the card or its driver is too old for a module.
func (c *Card) check(m *Module) error {
	if m.Compute <= c.Compute && m.Driver <= c.Driver {
		return nil
	}
	return &driver.UnavailableError{Backend: "cuda",
		Reason: fmt.Sprintf("compute capability 8.0 and driver 11080 are the least, this is "+
			"%d.%d and %d", c.Compute/10, c.Compute%10, c.Driver),
		Fix: "install a driver from 520 on, or gather and digest on the CPU"}
}

// Budget limits the share of a card that a Pattern may take. A bus that answers in 1.3 microseconds
// needs 57 KiB under way for 45 GB/s; of entries of 656 bytes a multiprocessor has 60 KiB under
// way. (H100, PCIe 5, 656 bytes at random places of 256 MiB: 19 GB/s by one multiprocessor, 44 by
// three; the copy engine has 54.)
type Budget struct {
	SMs int // multiprocessors
}

// Launch is how a Pattern is moved.
type Launch struct {
	Kernel          string
	Blocks, Threads uint32
	Shared          uint32 // bytes of dynamic shared memory
	InFlight        uint64 // bytes under way at most
}

// The shapes of the kernels, as in gather.h and gather.cu.
const (
	rowsThreads  = 768  // SL_ROWS_THREADS
	asyncThreads = 1024 // SL_ASYNC_THREADS
	ahead        = 3    // SL_AHEAD
	warpRows     = 2    // entries that a warp has under way
	warpThreads  = 32
	laneBytes    = 64 // that a lane has under way
	lineBytes    = 128
	columnBytes  = 16 // of a slot for each lane
	warpsMin     = 4
	// The slots of a block take at most asyncShared bytes of its shared memory. On an H100 a kernel
	// with 96 KiB of slots loads 44 GB/s by three multiprocessors, one with 192 KiB 32.
	asyncShared = 128 << 10
	// From so many blocks, and so many bytes under way, on registers are no slower: by eight blocks
	// they load 48 GB/s on an H100, asynchronous copies 45; by four 36 and 45.
	rowsBlocks = 6
	rowsEnough = 128 << 10
)

// plan is the launch, within the budget, of the kernel that loads fastest from behind the bus: the
// one that has most under way, unless both have enough. Stores to the bus wait for nothing, so they
// go through registers, and so do nests. The error is driver.ErrBounds: for a budget of nothing, or
// a memory at an odd address.
func (a *args) plan(c *Card, b Budget, nest bool) (Launch, error) {
	if b.SMs < 1 {
		return Launch{}, fmt.Errorf("a kernel needs a multiprocessor, the budget has %d: %w", b.SMs,
			driver.ErrBounds)
	}
	p := &a.part[0]
	if p.width == 0 {
		return Launch{}, refused("memory at", fmt.Sprintf("%#x and %#x", p.dst, p.src),
			fmt.Sprintf("multiples of %d", Align))
	}
	entry := uint64(p.entry)
	rows := Launch{Kernel: KernelRows, Threads: rowsThreads,
		InFlight: rowsThreads / warpThreads * min(warpRows*entry, warpThreads*laneBytes)}
	rows.spread(a.count, c.SMs, b, rowsThreads/warpThreads*warpRows)
	if nest || a.flags&farDst != 0 {
		return rows, nil
	}
	window := warpThreads * uint64(p.width)
	slot := (entry + lineBytes + window - 1) / window * warpThreads * columnBytes
	room := min(uint64(c.Shared), asyncShared)
	warps := min(room/(ahead*slot), asyncThreads/warpThreads)
	if warps < warpsMin { // slots of such entries do not fit
		return rows, nil
	}
	async := Launch{Kernel: KernelAsync, Threads: uint32(warps * warpThreads),
		Shared: uint32(warps * ahead * slot), InFlight: warps * ahead * entry}
	async.spread(a.count, c.SMs, b, warps*ahead)
	if async.InFlight/uint64(async.Blocks) <= rows.InFlight/uint64(rows.Blocks) ||
		rows.Blocks >= rowsBlocks && rows.InFlight >= rowsEnough {
		return rows, nil
	}
	return async, nil
}

// spread gives a launch as many blocks as the budget and the card allow, and no more than there are
// entries for, of which a block has each under way.
func (l *Launch) spread(entries uint64, sms int, b Budget, each uint64) {
	l.Blocks = uint32(max(1, min(uint64(b.SMs), uint64(sms), (entries+each-1)/each)))
	l.InFlight *= uint64(l.Blocks)
}

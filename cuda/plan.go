// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// ErrBudget is what is answered where a budget does not allow what is asked for.
var ErrBudget = errors.New("beyond the budget")

// Card is what a plan must know of a card.
type Card struct {
	Compute int    // 10 * major + minor
	Driver  int    // as cuDriverGetVersion answers
	SMs     int    // multiprocessors
	Shared  uint32 // bytes of shared memory that a block may opt in to
}

// Budget is what a Move may take of a card, by one of its fields: how many multiprocessors,
// or how many bytes may be under way. A bus that answers in 1.3 microseconds needs 57 KiB
// under way for 45 GB/s. The kernel spreads over as few multiprocessors as that takes. The zero
// value leaves all of them to others: copy engine and CPU do the work. (H100, PCIe 5, 656 bytes at
// random places of 256 MiB: 19 GB/s by one multiprocessor, 44 by three; the copy engine has 54.)
// InFlight is rounded up to what a multiprocessor has under way: 60 KiB of entries of 656 bytes.
type Budget struct {
	SMs      int
	InFlight uint64
}

// Launch is how a Move is performed. Kernel to Shared are those of kernels alone.
type Launch struct {
	Variant         string
	Kernel          string
	Blocks, Threads uint32
	Shared          uint32 // bytes of dynamic shared memory
	InFlight        uint64 // bytes under way at most; 0: as many as the copy engine likes
	Why             string // this variant and not another
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

// Plan chooses a variant for a Move between the host and a card, and its shape within a budget,
// from what is known beforehand; a Device measures. Plan takes asynchronous copies where a
// few multiprocessors load from behind the bus, registers otherwise; the CPU and the copy engine
// where the budget is nothing. only names a variant: that one or a *VariantError. A card or driver
// that is too old is a *driver.UnavailableError, a layout that kernels do not take a *LayoutError.
func Plan(m *Move, c Card, b Budget, only string) (Launch, error) {
	var a args
	if err := m.fill(&a); err != nil {
		return Launch{}, err
	}
	if err := c.check(); err != nil {
		return Launch{}, err
	}
	switch {
	case only != "":
		l, err := a.plan(&c, b, only)
		l.Why = "asked for"
		return l, err
	case b == (Budget{}):
		return Launch{Variant: VariantStaged, Why: "the budget has no multiprocessor: the CPU " +
			"gathers, the copy engine moves"}, nil
	}
	return a.best(&c, b)
}

// best plans the kernel that loads fastest from behind the bus, which is the one that has most
// under way, unless both have enough.
func (a *args) best(c *Card, b Budget) (Launch, error) {
	rows, err := a.plan(c, b, VariantRows)
	if err != nil {
		return Launch{}, err
	}
	if a.flags&farDst != 0 {
		rows.Why = "through registers: stores to the bus wait for nothing"
		return rows, nil
	}
	l, err := a.plan(c, b, VariantAsync)
	if err != nil { // which is that the entries are too large
		rows.Why = reason(err)
		return rows, nil
	}
	switch {
	case l.InFlight/uint64(l.Blocks) <= rows.InFlight/uint64(rows.Blocks):
		rows.Why = "through registers: asynchronous copies have no more of such entries under way"
		return rows, nil
	case rows.Blocks >= rowsBlocks && rows.InFlight >= rowsEnough:
		rows.Why = "through registers: so many multiprocessors have enough under way by them"
		return rows, nil
	}
	l.Why = "by asynchronous copies: a few multiprocessors have more under way by them"
	return l, nil
}

// plan is the launch of a variant, or a *VariantError; for a kernel it may be a *LayoutError.
func (a *args) plan(c *Card, b Budget, variant string) (Launch, error) {
	if kernelOf(variant) == "" {
		return Launch{Variant: variant}, knownVariant(variant)
	}
	if err := b.check(variant); err != nil {
		return Launch{}, err
	}
	if err := a.aligned(); err != nil {
		return Launch{}, err
	}
	l := a.rows()
	if variant == VariantAsync {
		var why string
		if l, why = a.async(c); why != "" {
			return Launch{}, unfit(variant, why)
		}
	}
	l.Variant = variant
	l.Blocks = a.blocks(&l, c.SMs, b)
	l.InFlight *= uint64(l.Blocks)
	return l, nil
}

// check reports whether a kernel has a place within the budget.
func (b Budget) check(variant string) error {
	switch {
	case b.SMs < 0 || b.SMs == 0 && b.InFlight == 0:
		return &VariantError{variant, fmt.Sprintf("a kernel needs a multiprocessor, the "+
			"budget has %d", b.SMs), ErrBudget}
	case b.SMs > 0 && b.InFlight > 0:
		return &VariantError{variant, fmt.Sprintf("%d multiprocessors and %d bytes under way: "+
			"give one of them", b.SMs, b.InFlight), ErrBudget}
	}
	return nil
}

// check reports whether card and driver can load the kernels, by what they say.
func (c *Card) check() error {
	if moves.Compute <= c.Compute && moves.Driver <= c.Driver {
		return nil
	}
	return &driver.UnavailableError{Backend: "cuda",
		Reason: "compute capability 8.0 and driver 11080 are the least, this is " + c.version(),
		Fix:    "install a driver from 520 on, or gather by Twin"}
}

func (c *Card) version() string {
	return fmt.Sprintf("%d.%d and %d", c.Compute/10, c.Compute%10, c.Driver)
}

// rows is the launch through registers, with what a block has under way.
func (a *args) rows() Launch {
	l := Launch{Kernel: KernelRows, Threads: rowsThreads}
	warp := min(warpRows*a.longest(), warpThreads*laneBytes)
	l.InFlight = rowsThreads / warpThreads * warp
	return l
}

// async is the launch by asynchronous copies, or why there is none.
func (a *args) async(c *Card) (Launch, string) {
	slot := uint64(0)
	for k := range a.part[:a.parts] {
		window := warpThreads * uint64(a.part[k].width)
		windows := (uint64(a.part[k].entry) + lineBytes + window - 1) / window
		slot = max(slot, windows*warpThreads*columnBytes)
	}
	room := min(uint64(c.Shared), asyncShared)
	warps := min(room/(ahead*slot), asyncThreads/warpThreads)
	if warps < warpsMin {
		return Launch{}, fmt.Sprintf("slots for entries of %d bytes do not fit in %d bytes of "+
			"shared memory", a.longest(), room)
	}
	return Launch{Kernel: KernelAsync, Threads: uint32(warps * warpThreads),
		Shared: uint32(warps * ahead * slot), InFlight: warps * ahead * a.longest()}, ""
}

// longest is the longest entry.
func (a *args) longest() uint64 { return uint64(max(a.part[0].entry, a.part[1].entry)) }

// blocks is what the budget allows, and no more than there are entries for.
func (a *args) blocks(l *Launch, sms int, b Budget) uint32 {
	each := uint64(l.Threads) / warpThreads * warpRows
	if l.Kernel == KernelAsync {
		each = uint64(l.Threads) / warpThreads * ahead
	}
	n := uint64(b.SMs)
	if b.InFlight > 0 {
		n = (b.InFlight + l.InFlight - 1) / l.InFlight
	}
	return uint32(max(1, min(n, uint64(sms), (a.count+each-1)/each)))
}

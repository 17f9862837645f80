// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"fmt"
	"slices"

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
// value leaves all of them to others: copy engine and CPU do the work.
type Budget struct {
	SMs      int
	InFlight uint64
}

// Launch is how a Move is performed. Module to Slots are those of kernels alone.
type Launch struct {
	Variant         string
	Module, Kernel  string
	Blocks, Threads uint32
	Shared          uint32 // bytes of dynamic shared memory
	Slots           uint32 // of the ring of each thread
	InFlight        uint64 // bytes under way at most; 0: as many as the copy engine likes
	Why             string // this variant and not another
}

// The shapes of the kernels, as in gather.h.
const (
	rowsThreads = 768 // SL_ROWS_THREADS
	bulkThreads = 64  // SL_BULK_THREADS
	slotHead    = 16  // SL_SLOT_HEAD
	slotsMin    = 2   // SL_SLOTS_MIN
	slotsMax    = 8   // deeper rings have more under way than any bus needs
	warpRows    = 2   // entries that a warp has under way
	warpThreads = 32
	laneBytes   = 64 // that a lane has under way
)

// Plan chooses a variant for a Move between the host and a card, and its shape within a budget,
// from what is known beforehand; a Device measures. Bulk copies are taken where card and
// driver have them, all is a multiple of 16 and a ring of at least two entries a thread fits in
// shared memory; registers otherwise; the CPU and the copy engine where the budget is nothing. only
// names a variant: that one or a *VariantError. A card or driver that is too old is a
// *driver.UnavailableError, a layout that kernels do not take a *LayoutError.
func Plan(m *Move, c Card, b Budget, only string) (Launch, error) {
	var a args
	if err := m.fill(&a); err != nil {
		return Launch{}, err
	}
	fit := c.modules()
	if len(fit) == 0 {
		return Launch{}, c.tooOld()
	}
	variant, why := only, "asked for"
	switch {
	case only != "":
	case b == (Budget{}):
		variant, why = VariantStaged, "the budget has no multiprocessor: the CPU gathers, the "+
			"copy engine moves"
	default:
		variant, why = VariantBulk, "bulk copies: one operation an entry"
		var no *VariantError
		if _, err := a.plan(&fit[0], &c, b, variant); errors.As(err, &no) && no.Err != ErrBudget {
			variant, why = VariantRows, no.Reason
		}
	}
	l, err := a.plan(&fit[0], &c, b, variant)
	if err != nil {
		return Launch{}, err
	}
	l.Why = why
	return l, nil
}

// plan is the launch of a variant, or a *VariantError; for a kernel it may be a *LayoutError.
func (a *args) plan(mod *Module, c *Card, b Budget, variant string) (Launch, error) {
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
	if variant == VariantBulk {
		var why string
		if l, why = a.bulk(c); why == "" {
			why = mod.lacksBulk(c)
		}
		if why != "" {
			return Launch{}, unfit(variant, why)
		}
	}
	l.Module, l.Variant = mod.Name, variant
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

// lacksBulk is why a module has no bulk copies; "" if it has.
func (m *Module) lacksBulk(c *Card) string {
	switch {
	case slices.Contains(m.Kernels, KernelBulk):
		return ""
	case c.Compute < modules[0].Compute:
		return m.Name + " has no bulk copies: they need compute capability 9.0, this is " +
			c.version()
	case c.Driver < modules[0].Driver:
		return fmt.Sprintf("the driver is too old for the bulk module: it says %d, want %d",
			c.Driver, modules[0].Driver)
	}
	return m.Name +
		" has no bulk copies, and the driver did not take the module that has: this is " +
		c.version()
}

// modules are those that the card can load by what it says, the most capable first.
func (c *Card) modules() []Module {
	for i, m := range modules {
		if m.Compute <= c.Compute && m.Driver <= c.Driver {
			return modules[i:]
		}
	}
	return nil
}

func (c *Card) tooOld() error {
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

// bulk is the launch by bulk copies, or why there is none.
func (a *args) bulk(c *Card) (Launch, string) {
	for k := range a.part[:a.parts] {
		if a.part[k].width != 16 {
			return Launch{}, fmt.Sprintf("bulk copies need multiples of 16, part %d is one of %d",
				k, a.part[k].width)
		}
	}
	slot := a.longest() + slotHead
	threads := uint64(bulkThreads)
	for threads > warpThreads && uint64(c.Shared)/(threads*slot) < 2*slotsMin {
		threads /= 2
	}
	slots := min(uint64(c.Shared)/(threads*slot), slotsMax)
	if slots < slotsMin {
		return Launch{}, fmt.Sprintf("rings for entries of %d bytes do not fit in %d bytes of "+
			"shared memory",
			a.longest(), c.Shared)
	}
	return Launch{Kernel: KernelBulk, Threads: uint32(threads), Slots: uint32(slots),
		Shared: uint32(threads * slots * slot), InFlight: threads * (slots - 1) * a.longest()}, ""
}

// longest is the longest entry.
func (a *args) longest() uint64 { return uint64(max(a.part[0].entry, a.part[1].entry)) }

// blocks is what the budget allows, and no more than there are entries for.
func (a *args) blocks(l *Launch, sms int, b Budget) uint32 {
	each := uint64(l.Threads)
	if l.Kernel == KernelRows {
		each = uint64(l.Threads) / warpThreads * warpRows
	}
	n := uint64(b.SMs)
	if b.InFlight > 0 {
		n = (b.InFlight + l.InFlight - 1) / l.InFlight
	}
	return uint32(max(1, min(n, uint64(sms), (a.count+each-1)/each)))
}

// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/sluicehq/sluice/driver"
)

var (
	hopper = Card{Compute: 90, Driver: 12040, SMs: 132, Shared: 227 << 10}
	ampere = Card{Compute: 80, Driver: 12040, SMs: 108, Shared: 163 << 10}
)

func entries(count int, sizes ...uint64) *Move {
	m := &Move{Count: count}
	for _, size := range sizes {
		m.Parts = append(m.Parts, Part{Entry: size})
	}
	return m
}

func TestPlan(t *testing.T) {
	cases := []struct {
		name   string
		m      *Move
		card   Card
		budget Budget
		only   string
		kernel string
		blocks uint32
		why    string
	}{
		{"a few", entries(2048, 656), hopper, Budget{SMs: 4}, "", KernelAsync, 4,
			"a few multiprocessors have more under way"},
		{"many", entries(2048, 656), hopper, Budget{SMs: 8}, "", KernelRows, 8,
			"so many multiprocessors have enough"},
		{"registers asked for", entries(2048, 656), hopper, Budget{SMs: 4}, VariantRows,
			KernelRows, 4, "asked for"},
		{"ampere", entries(2048, 656), ampere, Budget{SMs: 4}, "", KernelAsync, 4, ""},
		{"multiple of 8", entries(2048, 584), hopper, Budget{SMs: 2}, "", KernelAsync, 2, ""},
		{"pair", entries(2048, 656, 132), hopper, Budget{SMs: 2}, "", KernelAsync, 2, ""},
		{"multiple of 4", entries(2048, 788), hopper, Budget{SMs: 4}, "", KernelRows, 4,
			"have no more of such entries under way"},
		{"tiny entries, many blocks", entries(1<<20, 4), hopper, Budget{SMs: 8}, "", KernelAsync, 8,
			""},
		{"few entries", entries(40, 656), hopper, Budget{SMs: 100}, VariantRows, KernelRows, 1, ""},
		{"no entries", entries(0, 656), hopper, Budget{SMs: 100}, "", KernelAsync, 1, ""},
		{"more than there are", entries(1<<20, 656), ampere, Budget{SMs: 1000}, "", KernelRows,
			108, ""},
		{"in flight", entries(1<<20, 656), ampere, Budget{InFlight: 57 << 10}, VariantRows,
			KernelRows, 2, ""},
		{"in flight, one block", entries(1<<20, 656), ampere, Budget{InFlight: 57 << 10}, "",
			KernelAsync, 1, ""},
		{"large entries", entries(64, 64<<10), hopper, Budget{SMs: 1}, "", KernelRows, 1,
			"65536 bytes do not fit"},
	}
	for _, c := range cases {
		l, err := Plan(c.m, c.card, c.budget, c.only)
		if err != nil || l.Kernel != c.kernel || l.Blocks != c.blocks ||
			!strings.Contains(l.Why, c.why) {
			t.Errorf("%s: %+v, %v", c.name, l, err)
		}
		if l.Shared > c.card.Shared || l.Kernel == KernelAsync && (l.Threads > asyncThreads ||
			l.Threads%warpThreads != 0 || l.Shared == 0) {
			t.Errorf("%s: %+v cannot be launched", c.name, l)
		}
	}
}

// TestPlanHasEnoughUnderWay: four multiprocessors fill a Gen5 bus that answers in 1.3
// microseconds, by either kernel, and some more.
func TestPlanHasEnoughUnderWay(t *testing.T) {
	for _, variant := range []string{VariantRows, VariantAsync} {
		l, err := Plan(entries(1<<20, 656), hopper, Budget{SMs: 4}, variant)
		if err != nil || l.Variant != variant || l.Kernel != kernelOf(variant) ||
			l.InFlight < 79<<10 {
			t.Errorf("%+v, %v", l, err)
		}
	}
}

// TestPlanWithoutAMultiprocessor: others do the work.
func TestPlanWithoutAMultiprocessor(t *testing.T) {
	l, err := Plan(entries(2048, 656), hopper, Budget{}, "")
	if err != nil || l.Variant != VariantStaged || l.Kernel != "" ||
		!strings.Contains(l.Why, "no multiprocessor") {
		t.Errorf("%+v, %v", l, err)
	}
}

func TestPlanErrors(t *testing.T) {
	m := entries(1, 656)
	for name, b := range map[string]Budget{"negative": {SMs: -1}, "both": {SMs: 1, InFlight: 1}} {
		if _, err := Plan(m, hopper, b, ""); !errors.Is(err, ErrBudget) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for variant, want := range map[string]error{VariantRows: ErrBudget, VariantAsync: ErrBudget,
		"dma": driver.ErrNotSupported} {
		var no *VariantError
		if _, err := Plan(m, hopper, Budget{}, variant); !errors.Is(err, want) ||
			!errors.As(err, &no) || no.Variant != variant {
			t.Errorf("%s: %v", variant, err)
		}
	}
	var no *VariantError
	if _, err := Plan(entries(8, 64<<10), hopper, Budget{SMs: 2}, VariantAsync); !errors.As(err,
		&no) || !strings.Contains(no.Reason, "do not fit") {
		t.Errorf("slots for 64 KiB: %v", err)
	}
	for _, c := range []Card{{Compute: 75, Driver: 13000}, {Compute: 90, Driver: 11000}} {
		var missing *driver.UnavailableError
		if _, err := Plan(m, c, Budget{SMs: 1}, ""); !errors.As(err, &missing) ||
			missing.Fix == "" {
			t.Errorf("%+v: %v", c, err)
		}
	}
	var layout *LayoutError
	if _, err := Plan(entries(1, 130), hopper, Budget{SMs: 1}, ""); !errors.As(err, &layout) {
		t.Errorf("odd entry: %v", err)
	}
	if _, err := Plan(entries(math.MaxInt32+1, 16), hopper, Budget{SMs: 1}, ""); !errors.As(err,
		&layout) {
		t.Errorf("more entries than a kernel counts: %v", err)
	}
}

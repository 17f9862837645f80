// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"strings"
	"testing"

	"github.com/sluicehq/sluice/driver"
)

var (
	hopper = Card{Compute: 90, Driver: 12040, SMs: 132, Shared: 227 << 10}
	ampere = Card{Compute: 80, Driver: 12040, SMs: 108, Shared: 163 << 10}
)

func entries(count int, sizes ...uint64) *args {
	a := &args{}
	err := a.begin(len(sizes), count)
	for k, size := range sizes {
		err = errors.Join(err, a.fill(k, size, side{}, side{}))
	}
	if err != nil {
		panic(err)
	}
	return a
}

func TestPlan(t *testing.T) {
	for _, c := range []struct {
		name   string
		a      *args
		card   Card
		budget Budget
		only   string
		kernel string
		blocks uint32
	}{
		{"a few", entries(2048, 656), hopper, Budget{SMs: 4}, "", KernelAsync, 4},
		{"many", entries(2048, 656), hopper, Budget{SMs: 8}, "", KernelRows, 8},
		{"registers asked for", entries(2048, 656), hopper, Budget{SMs: 4}, KernelRows,
			KernelRows, 4},
		{"ampere", entries(2048, 656), ampere, Budget{SMs: 4}, "", KernelAsync, 4},
		{"multiple of 8", entries(2048, 584), hopper, Budget{SMs: 2}, "", KernelAsync, 2},
		{"pair", entries(2048, 656, 132), hopper, Budget{SMs: 2}, "", KernelAsync, 2},
		{"no more under way", entries(2048, 788), hopper, Budget{SMs: 4}, "", KernelRows, 4},
		{"tiny entries, many blocks", entries(1<<20, 4), hopper, Budget{SMs: 8}, "", KernelAsync,
			8},
		{"few entries", entries(40, 656), hopper, Budget{SMs: 100}, KernelRows, KernelRows, 1},
		{"no entries", entries(0, 656), hopper, Budget{SMs: 100}, "", KernelAsync, 1},
		{"more than there are", entries(1<<20, 656), ampere, Budget{SMs: 1000}, "", KernelRows,
			108},
		{"large entries", entries(64, 64<<10), hopper, Budget{SMs: 1}, "", KernelRows, 1},
	} {
		l, err := c.a.plan(&c.card, c.budget, c.only)
		if err != nil || l.Kernel != c.kernel || l.Blocks != c.blocks {
			t.Errorf("%s: %+v, %v", c.name, l, err)
		}
		if l.Shared > c.card.Shared || l.Kernel == KernelAsync && (l.Threads > asyncThreads ||
			l.Threads%warpThreads != 0 || l.Shared == 0) {
			t.Errorf("%s: %+v cannot be launched", c.name, l)
		}
	}
	to := entries(2048, 656)
	to.flags = farDst
	l, err := to.plan(&hopper, Budget{SMs: 4}, "")
	if err != nil || l.Kernel != KernelRows {
		t.Errorf("to the host: %+v, %v", l, err)
	}
}

// TestPlanHasEnoughUnderWay: four multiprocessors fill a Gen5 bus that answers in 1.3
// microseconds, by either kernel, and some more.
func TestPlanHasEnoughUnderWay(t *testing.T) {
	for _, kernel := range []string{KernelRows, KernelAsync} {
		l, err := entries(1<<20, 656).plan(&hopper, Budget{SMs: 4}, kernel)
		if err != nil || l.Kernel != kernel || l.InFlight < 79<<10 {
			t.Errorf("%+v, %v", l, err)
		}
	}
}

func TestPlanErrors(t *testing.T) {
	odd := entries(1, 656)
	odd.part[0].width = 0
	for name, c := range map[string]struct {
		a      *args
		budget Budget
		kernel string
		want   error
		text   string
	}{
		"a negative budget": {entries(1, 656), Budget{SMs: -1}, "", driver.ErrBounds, "has -1"},
		"no budget":         {entries(1, 656), Budget{}, KernelRows, driver.ErrBounds, "has 0"},
		"an unknown kernel": {entries(1, 656), Budget{SMs: 1}, "dma", driver.ErrNotSupported,
			KernelAsync},
		"slots for 64 KiB": {entries(8, 64<<10), Budget{SMs: 2}, KernelAsync,
			driver.ErrNotSupported, "do not fit"},
		"an odd address": {odd, Budget{SMs: 1}, "", driver.ErrBounds, "odd address"},
	} {
		if _, err := c.a.plan(&hopper, c.budget, c.kernel); !errors.Is(err, c.want) ||
			!strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v, want %v and %q", name, err, c.want, c.text)
		}
	}
	for _, c := range []Card{{Compute: 75, Driver: 13000}, {Compute: 90, Driver: 11000}} {
		var missing *driver.UnavailableError
		if err := c.check(&moves); !errors.As(err, &missing) || missing.Fix == "" {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

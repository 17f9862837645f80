// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

var (
	hopper = Card{Compute: 90, Driver: 12040, SMs: 132, Shared: 227 << 10}
	ampere = Card{Compute: 80, Driver: 12040, SMs: 108, Shared: 163 << 10}
)

func entries(count int, size uint64) *args {
	a := &args{}
	if err := errors.Join(a.begin(count), a.fill(size, side{}, side{})); err != nil {
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
		nest   bool
		kernel string
		blocks uint32
	}{
		{"a few", entries(2048, 656), hopper, Budget{SMs: 4}, false, KernelAsync, 4},
		{"many", entries(2048, 656), hopper, Budget{SMs: 8}, false, KernelRows, 8},
		{"a nest", entries(2048, 656), hopper, Budget{SMs: 4}, true,
			KernelRows, 4},
		{"ampere", entries(2048, 656), ampere, Budget{SMs: 4}, false, KernelAsync, 4},
		{"multiple of 8", entries(2048, 584), hopper, Budget{SMs: 2}, false, KernelAsync, 2},
		{"no more under way", entries(2048, 788), hopper, Budget{SMs: 4}, false, KernelRows, 4},
		{"tiny entries, many blocks", entries(1<<20, 4), hopper, Budget{SMs: 8}, false, KernelAsync,
			8},
		{"few entries", entries(40, 656), hopper, Budget{SMs: 100}, true, KernelRows, 1},
		{"no entries", entries(0, 656), hopper, Budget{SMs: 100}, false, KernelAsync, 1},
		{"more than there are", entries(1<<20, 656), ampere, Budget{SMs: 1000}, false, KernelRows,
			108},
		{"large entries", entries(64, 64<<10), hopper, Budget{SMs: 1}, false, KernelRows, 1},
	} {
		l, err := c.a.plan(&c.card, c.budget, c.nest)
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
	l, err := to.plan(&hopper, Budget{SMs: 4}, false)
	if err != nil || l.Kernel != KernelRows {
		t.Errorf("to the host: %+v, %v", l, err)
	}
}

// TestPlanHasEnoughUnderWay: four multiprocessors fill a Gen5 bus that answers in 1.3
// microseconds, by either kernel, and some more.
func TestPlanHasEnoughUnderWay(t *testing.T) {
	for kernel, nest := range map[string]bool{KernelRows: true, KernelAsync: false} {
		l, err := entries(1<<20, 656).plan(&hopper, Budget{SMs: 4}, nest)
		if err != nil || l.Kernel != kernel || l.InFlight < 79<<10 {
			t.Errorf("%+v, %v", l, err)
		}
	}
}

func TestPlanErrors(t *testing.T) {
	for _, sms := range []int{-1, 0} {
		_, err := entries(1, 656).plan(&hopper, Budget{SMs: sms}, false)
		require.ErrorIs(t, err, driver.ErrBounds)
		require.ErrorContains(t, err, fmt.Sprintf("has %d", sms))
	}
	for _, c := range []Card{{Compute: 75, Driver: 13000}, {Compute: 90, Driver: 11000}} {
		var missing *driver.UnavailableError
		if err := c.check(&moves); !errors.As(err, &missing) || missing.Fix == "" {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

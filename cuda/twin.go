// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"math"

	"github.com/sluicehq/sluice/driver"
)

// tally is struct sl_tally of gather.h.
type tally struct{ skipped, bad, firstBad uint64 }

// clean is a tally before a Move.
var clean = tally{firstBad: math.MaxUint64}

// Run moves entries on the CPU, on the calling thread, as the kernels do on a card. Entries
// with a bad index are left out and counted, all others moved: then the error is
// driver.ErrBounds. A *LayoutError says that nothing was moved. Memory may lie at any address. Run
// allocates nothing unless it fails; parallel calls are allowed.
//
// A scatter over 128 MiB and more goes past the caches.
func Run(m *Move) (Tally, error) {
	var a args
	if err := m.fill(&a); err != nil {
		return Tally{}, err
	}
	t := clean
	if m.Count > 0 {
		move(m, &a, 0, a.count, &t)
	}
	return t.sum(a.count)
}

func (t *tally) sum(count uint64) (Tally, error) {
	sum := Tally{Moved: count - t.skipped - t.bad, Skipped: t.skipped, Bad: t.bad}
	if t.bad == 0 {
		return sum, nil
	}
	sum.FirstBad = t.firstBad
	return sum, driver.ErrBounds
}

// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// BenchmarkCost is what a wrapper costs, beside the backend without one: writes of 64 bytes,
// one at a time, from Submit to Poll. The ways take turns in blocks; medians are reported,
// and their ratio to the bare backend.
func BenchmarkCost(b *testing.B) {
	ways := []struct {
		name  string
		rules []Rule
	}{
		{"bare", nil}, {"without-rules", nil},
		{"not-hit", []Rule{{On: Write, Size: AtLeast(1 << 30), Do: Drop()}}},
		{"hit", []Rule{{On: Write, Do: Delay(0, 0)}}},
	}
	const block = 2000
	took := make([][]float64, len(ways))
	rigs := make([]*rig, len(ways))
	for i, w := range ways {
		if rigs[i] = newRig(b, w.rules...); i == 0 {
			rigs[i].strip()
		}
	}
	for n := 0; b.Loop(); n++ {
		i := n % len(ways)
		start := time.Now()
		rigs[i].writes(block)
		took[i] = append(took[i], float64(time.Since(start))/block)
	}
	var bare float64
	for i, w := range ways {
		if len(took[i]) == 0 {
			continue
		}
		slices.Sort(took[i])
		median := took[i][len(took[i])/2]
		if i == 0 {
			bare = median
		}
		b.ReportMetric(median, w.name+"-ns")
		b.ReportMetric(median/bare, w.name+"-x")
	}
}

// strip takes the wrapper off the near side.
func (r *rig) strip() {
	r.Helper()
	near, err := openMem()
	check(r, err)
	r.Cleanup(func() { check(r, near.Close()) })
	check(r, r.near.Close())
	r.near = near
	r.local = register(r, near, r.from)
	r.dial()
}

// writes runs so many, one at a time.
func (r *rig) writes(n int) {
	r.Helper()
	b := driver.Batch{Op: driver.Write, Descs: r.desc(0, 64)}
	var done [1]driver.Completion
	for range n {
		r.tags++
		require.NoError(r, r.peer.Submit(r.tags, &b))
		for got := 0; got == 0; {
			got, _ = r.near.Poll(done[:])
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// BenchmarkRequest hands 24 blocks of deepseek-v3.2 over, of 16 tokens each, in 61 layers,
// beside a copy of the memory.
func BenchmarkRequest(b *testing.B) {
	spec, err := layout.LookupSpec("deepseek-v3.2")
	require.NoError(b, err)
	for name, open := range map[string]func(testing.TB) driver.Backend{"mem": newMem,
		"shm": newShm} {
		b.Run(name, func(b *testing.B) {
			sides := func() []*layout.Side {
				return sidesOf(b, spec, layout.Placement{BlockTokens: 16, Blocks: 24})
			}
			c := newCrowd(b, crowdSetup{from: sides(), to: sides(), backend: open,
				config: func(_ bool, g *GroupConfig) {
					g.Edge = func(e *layout.Edge) { e.Op = engine.Write }
				}})
			j := c.newJob(b, layout.Span{To: 24 * 16})
			b.SetBytes(24 * 16 * 48_068)
			b.ReportAllocs()
			for b.Loop() {
				j.begin(b)
				j.push(b)
				<-j.requests[0].Done()
				j.number++
			}
		})
	}
	b.Run("memcpy", func(b *testing.B) {
		from, to := make([]byte, 24*16*48_068), make([]byte, 24*16*48_068)
		b.SetBytes(int64(len(from)))
		for b.Loop() {
			copy(to, from)
		}
	})
}

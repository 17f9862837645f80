// SPDX-License-Identifier: Apache-2.0

package mem_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/csrc/copy"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

var harness = drivertest.Harness{
	Name: "mem",
	New: func() (driver.Backend, error) {
		return mem.New(mem.Config{BatchesMax: 256})
	},
	Guards: true,
}

func TestMain(m *testing.M) { drivertest.Main(m, harness) }

func TestBackend(t *testing.T) { drivertest.Run(t, harness) }

// TestBackendByAStream is with the last of this machine's copies, which on most stores past the
// caches: runs are copied by other code, and nothing else differs.
func TestBackendByAStream(t *testing.T) {
	h := harness
	h.Wirings, h.Only = drivertest.Pair, drivertest.Moving
	byAStream(t, h)
}

func TestSoakBackendByAStream(t *testing.T) { byAStream(t, harness) }

func byAStream(t *testing.T, h drivertest.Harness) {
	t.Helper()
	before, all := copy.Chosen(), copy.Variants()
	require.NoError(t, copy.Set(copy.Only(all[len(all)-1])))
	t.Cleanup(func() { require.NoError(t, copy.Set(before)) })
	drivertest.Run(t, h)
}

// TestHostCopy: a Config that names no copy of this machine is refused.
func TestHostCopy(t *testing.T) {
	_, err := mem.New(mem.Config{HostCopy: "quick"})
	require.ErrorContains(t, err, `copy by "quick": this machine has `)
	require.ErrorIs(t, err, driver.ErrBounds)
}

func BenchmarkBackend(b *testing.B) { drivertest.Benchmark(b, harness) }

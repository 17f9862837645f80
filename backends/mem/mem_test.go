// SPDX-License-Identifier: Apache-2.0

package mem_test

import (
	"testing"

	"github.com/sluicehq/sluice/backends"
	"github.com/sluicehq/sluice/backends/backendtest"
	"github.com/sluicehq/sluice/backends/mem"
)

var harness = backendtest.Harness{
	Name: "mem",
	New: func() (backends.Backend, error) {
		return mem.New(mem.Config{BatchesMax: 256})
	},
}

func TestMain(m *testing.M) { backendtest.Main(m, harness) }

func TestBackend(t *testing.T) { backendtest.Run(t, harness) }

func BenchmarkBackend(b *testing.B) { backendtest.Benchmark(b, harness) }

// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"os"
	"testing"

	"github.com/sluicehq/sluice/backends"
	"github.com/sluicehq/sluice/backends/backendtest"
)

var sharedHarness = backendtest.Harness{
	Name: "shm",
	New:  func() (backends.Backend, error) { return New(Config{Workers: 2}) },
}

// foreignHarness is the same backend over memory that only its process has.
var foreignHarness = backendtest.Harness{
	Name:    "shm-foreign",
	New:     func() (backends.Backend, error) { return New(Config{Workers: 2}) },
	Local:   backendtest.ForeignMemory,
	Remote:  backendtest.ForeignMemory,
	Wirings: backendtest.Processes, // within one process it is the same code
}

func TestMain(m *testing.M) {
	if kind, ok := os.LookupEnv(ownerVariable); ok {
		if kind == "writer" {
			os.Exit(writeAndFreeze())
		}
		os.Exit(serveOwner(kind))
	}
	backendtest.Main(m, sharedHarness, foreignHarness)
}

func TestBackend(t *testing.T) { backendtest.Run(t, sharedHarness) }

func TestBackendForeign(t *testing.T) { backendtest.Run(t, foreignHarness) }

func BenchmarkBackend(b *testing.B) { backendtest.Benchmark(b, sharedHarness) }

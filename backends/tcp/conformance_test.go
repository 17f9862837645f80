// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"testing"

	"github.com/sluicehq/sluice/backends"
	"github.com/sluicehq/sluice/backends/backendtest"
)

var plainHarness = backendtest.Harness{
	Name:  "tcp",
	New:   func() (backends.Backend, error) { return New(Config{Plaintext: true, Listen: "127.0.0.1:0"}) },
	Limit: 5e9,
}

func TestMain(m *testing.M) { backendtest.Main(m, plainHarness) }

func TestBackend(t *testing.T) { backendtest.Run(t, plainHarness) }

func BenchmarkBackend(b *testing.B) { backendtest.Benchmark(b, plainHarness) }

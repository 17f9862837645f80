// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"fmt"
	"os"
	"testing"

	"github.com/sluicehq/sluice/backends"
	"github.com/sluicehq/sluice/backends/backendtest"
)

var plainHarness = backendtest.Harness{
	Name: "tcp",
	New:  func() (backends.Backend, error) { return New(Config{Plaintext: true, Listen: "127.0.0.1:0"}) },
}

// secureHarness is the same backend with TLS, by IPv6.
var secureHarness = backendtest.Harness{
	Name:    "tcp-tls",
	New:     func() (backends.Backend, error) { return New(Config{TLS: sharedAuthority.config(), Listen: "[::1]:0"}) },
	Wirings: backendtest.Processes,
	Without: []string{"NoAllocation", "NoAllocationPages"}, // crypto/tls allocates for each record
}

// singleHarness has one connection for all data, and little in flight.
var singleHarness = backendtest.Harness{
	Name: "tcp-single",
	New: func() (backends.Backend, error) {
		return New(Config{Plaintext: true, Listen: "127.0.0.1:0", Conns: 1, Flight: 512 << 10, BatchesMax: 64, NotesMax: 64})
	},
	Wirings: backendtest.Pair,
	Only: []string{"Load", "Full", "NotifyAfterData", "NotifyOrder", "NotifyBackPressure", "CountAfterData", "CancelWrite",
		"CancelNotify", "PeerClose", "LastMessageInFlight", "SilenceUnderWrites", "ArmFull", "NoAllocation", "Hammer"},
}

func TestMain(m *testing.M) {
	if path := os.Getenv(ownerVariable); path != "" {
		if err := serveOwner(path); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	backendtest.Main(m, plainHarness, secureHarness, singleHarness, hostHarness, secureHostHarness)
}

func TestBackend(t *testing.T) { backendtest.Run(t, plainHarness) }

func TestBackendSecure(t *testing.T) { backendtest.Run(t, secureHarness) }

func TestBackendSingle(t *testing.T) { backendtest.Run(t, singleHarness) }

func BenchmarkBackend(b *testing.B) { backendtest.Benchmark(b, plainHarness) }

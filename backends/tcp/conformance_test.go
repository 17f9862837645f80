// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testpoint"
)

var plainHarness = drivertest.Harness{
	Name: "tcp",
	New: func() (driver.Backend, error) {
		return New(Config{Plaintext: true, Listen: "127.0.0.1:0"})
	},
	Park: parkAt, OwnerSpots: ownerSpots, Disturb: breakConns,
	Guards: true,
	Grace:  300 * time.Millisecond,
}

// The spots at which the suite parks an owner.
var (
	ownerSpots = []string{"aimed", "received", "ticket", "checked", "landed"}
)

// breakConns ends some connections of each peer, or all, and resets some of those.
func breakConns(b driver.Backend, random *rand.Rand) (mend func()) {
	owner := b.(*Backend)
	owner.mu.Lock()
	peers := slices.Collect(maps.Values(owner.accepted))
	owner.mu.Unlock()
	some := random.IntN(2)
	for _, g := range peers {
		g.mu.Lock()
		conns := slices.Clone(g.conns)
		g.mu.Unlock()
		for _, c := range conns {
			if c != nil && random.IntN(2) >= some {
				_ = c.tcp.SetLinger(random.IntN(2) - 1)
				_ = c.tcp.Close()
			}
		}
	}
	return func() {}
}

// parkAt has the first reading goroutine that comes to a spot call f there.
func parkAt(name string, f func()) { testpoint.First("tcp: "+name, f) }

// secureHarness is the same backend with TLS, by IPv6.
var secureHarness = drivertest.Harness{
	Name: "tcp-tls",
	New: func() (driver.Backend, error) {
		return New(Config{TLS: sharedTLS, Listen: "[::1]:0"})
	},
	Wirings: drivertest.Processes,
	Guards:  true,
	Park:    parkAt, OwnerSpots: ownerSpots, Disturb: breakConns,
	// crypto/tls allocates for each record
	Without: []string{"NoAllocation"},
}

// singleHarness has one connection for all data, and little in flight.
var singleHarness = drivertest.Harness{
	Name: "tcp-single",
	New: func() (driver.Backend, error) {
		return New(Config{Plaintext: true, Listen: "127.0.0.1:0", Conns: 1, Flight: 512 << 10,
			BatchesMax: 64, NotifyMax: 64})
	},
	Wirings: drivertest.Pair,
	Only: []string{"Load", "Full", "MessageBehindItsBytes", "MessageOrder", "MessageBackPressure",
		"Cancel", "PeerClose", "LastMessage", "RevokeUnderWrites", "NoAllocation", "Together"},
}

// pinnedHarness has keys of its own, as nothing else was given.
var pinnedHarness = drivertest.Harness{
	Name:    "tcp-pinned",
	New:     func() (driver.Backend, error) { return New(Config{Listen: "127.0.0.1:0"}) },
	Wirings: drivertest.Processes,
	Only:    drivertest.Streaming,
}

func TestMain(m *testing.M) {
	if path := os.Getenv(ownerVariable); path != "" {
		if err := serveOwner(path); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Getenv(moversVariable) != "" {
		if err := serveMovers(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	drivertest.Main(m, plainHarness, secureHarness, singleHarness, pinnedHarness, hostHarness,
		secureHostHarness)
}

func TestBackend(t *testing.T) { drivertest.Run(t, plainHarness) }

// TestBackendSecure: TLS changes the stream, and not what goes over it.
func TestBackendSecure(t *testing.T) {
	h := secureHarness
	h.Only = drivertest.Streaming
	drivertest.Run(t, h)
}

func TestSoakBackendSecure(t *testing.T) { drivertest.Run(t, secureHarness) }

func TestBackendSingle(t *testing.T) { drivertest.Run(t, singleHarness) }

func TestBackendPinned(t *testing.T) { drivertest.Run(t, pinnedHarness) }

// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"os"
	"testing"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// newSpotted is New, with the spots at which the suite parks threads of C where there is cgo.
var newSpotted = func(cfg Config) (driver.Backend, error) { return New(cfg) }

// directHarness moves between memory of UCX's own, which near peers map.
var directHarness = drivertest.Harness{
	Name:      "ucx-direct",
	New:       func() (driver.Backend, error) { return newSpotted(Config{}) },
	Kept:      ucp.Kept,
	OwnMemory: true,
	Guards:    true,
}

// servedHarness is the same over memory that the kernel copies from, as the owner
// asks it to.
var servedHarness = drivertest.Harness{
	Name:   "ucx",
	New:    func() (driver.Backend, error) { return New(Config{}) },
	Kept:   ucp.Kept,
	Guards: true,
}

// messagesHarness is that where the kernel does not: the owner's thread lands messages.
var messagesHarness = drivertest.Harness{
	Name: "ucx-messages",
	New: func() (driver.Backend, error) {
		return New(Config{Transports: "posix,sysv,self,tcp", Devices: "lo"})
	},
	Kept:    ucp.Kept,
	Wirings: drivertest.Processes,
	Guards:  true,
}

// tcpHarness is what peers on other machines see.
var tcpHarness = drivertest.Harness{
	Name:   "ucx-tcp",
	New:    func() (driver.Backend, error) { return New(Config{Transports: "tcp", Devices: "lo"}) },
	Guards: true,
}

// fakeHarness tests all that lies above C, without UCX.
var fakeHarness = drivertest.Harness{
	Name:    "ucx-fake",
	New:     func() (driver.Backend, error) { return newFake(Config{Workers: 2}) },
	Wirings: drivertest.Self | drivertest.Pair,
	// it is C that enters, and that outlives faults
	Without: []string{"RenewUnderReads", "RenewUnderWrites", "FaultsNear", "FaultsFar"},
}

func TestMain(m *testing.M) {
	if list, ok := os.LookupEnv(writerVariable); ok {
		os.Exit(serveWriter(list))
	}
	if spec, ok := os.LookupEnv(ownerVariable); ok {
		os.Exit(serveOwner(spec))
	}
	drivertest.Main(m, directHarness, servedHarness, messagesHarness, tcpHarness, fakeHarness)
}

func TestDirect(t *testing.T)   { drivertest.Run(t, directHarness) }
func TestMessages(t *testing.T) { drivertest.Run(t, messagesHarness) }

// TestServed: within one backend it is the code of TestDirect.
func TestServed(t *testing.T) {
	h := servedHarness
	h.Wirings = drivertest.Pair | drivertest.Processes
	drivertest.Run(t, h)
}

// TestTCP: within one process it is the code of TestDirect and TestServed.
func TestTCP(t *testing.T) {
	h := tcpHarness
	h.Wirings = drivertest.Processes
	drivertest.Run(t, h)
}

func TestSoakServed(t *testing.T) { drivertest.Run(t, servedHarness) }
func TestSoakTCP(t *testing.T)    { drivertest.Run(t, tcpHarness) }
func TestSoakFake(t *testing.T)   { drivertest.Run(t, fakeHarness) }

func BenchmarkDirect(b *testing.B)   { drivertest.Benchmark(b, directHarness) }
func BenchmarkServed(b *testing.B)   { drivertest.Benchmark(b, servedHarness) }
func BenchmarkMessages(b *testing.B) { drivertest.Benchmark(b, messagesHarness) }

// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"os"
	"testing"

	"github.com/sluicehq/sluice/backends"
	"github.com/sluicehq/sluice/backends/backendtest"
)

// directHarness moves between memory of UCX's own, which near peers map.
var directHarness = backendtest.Harness{
	Name:      "ucx-direct",
	New:       func() (backends.Backend, error) { return New(Config{}) },
	OwnMemory: true,
}

// servedHarness is the same over memory that the kernel copies from, as the owner
// asks it to.
var servedHarness = backendtest.Harness{
	Name: "ucx",
	New:  func() (backends.Backend, error) { return New(Config{}) },
}

// messagesHarness is that where the kernel does not: the owner's thread lands messages.
var messagesHarness = backendtest.Harness{
	Name:    "ucx-messages",
	New:     func() (backends.Backend, error) { return New(Config{Transports: "posix,sysv,self"}) },
	Wirings: backendtest.Processes,
}

// tcpHarness is what peers on other machines see.
var tcpHarness = backendtest.Harness{
	Name: "ucx-tcp",
	New:  func() (backends.Backend, error) { return New(Config{Transports: "tcp", Devices: "lo"}) },
}

// fakeHarness tests all that lies above C, without UCX.
var fakeHarness = backendtest.Harness{
	Name:    "ucx-fake",
	New:     func() (backends.Backend, error) { return newFake(Config{Workers: 2}) },
	Wirings: backendtest.Self | backendtest.Pair,
}

func TestMain(m *testing.M) {
	if list, ok := os.LookupEnv(writerVariable); ok {
		os.Exit(serveWriter(list))
	}
	backendtest.Main(m, directHarness, servedHarness, messagesHarness, tcpHarness, fakeHarness)
}

func TestDirect(t *testing.T)   { backendtest.Run(t, directHarness) }
func TestServed(t *testing.T)   { backendtest.Run(t, servedHarness) }
func TestMessages(t *testing.T) { backendtest.Run(t, messagesHarness) }
func TestTCP(t *testing.T)      { backendtest.Run(t, tcpHarness) }
func TestFake(t *testing.T)     { backendtest.Run(t, fakeHarness) }

func BenchmarkDirect(b *testing.B)   { backendtest.Benchmark(b, directHarness) }
func BenchmarkServed(b *testing.B)   { backendtest.Benchmark(b, servedHarness) }
func BenchmarkMessages(b *testing.B) { backendtest.Benchmark(b, messagesHarness) }

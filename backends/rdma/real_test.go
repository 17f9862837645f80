// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package rdma

import (
	"errors"
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/machine"
)

// deviceVariable tells the second process which device is its own.
const deviceVariable = "SLUICE_TEST_RDMA_DEVICE"

// realHarness runs over real verbs, between two processes: each has a device of its own
// where there are two. What is said of one process TestStandIn covers.
var realHarness = drivertest.Harness{
	Name:    "rdma",
	New:     func() (driver.Backend, error) { return New(realConfig()) },
	Start:   startOnSecond,
	Wirings: drivertest.Processes,
	Only:    inGuest(besideStandIn),
	Park:    parkAt,
	Spots:   []string{"submit"},
}

func TestMain(m *testing.M) { drivertest.Main(m, realHarness) }

// soakHarness runs all that depends on a kernel, a NIC and a second process.
func soakHarness() drivertest.Harness {
	h := realHarness
	h.Only = inGuest(append([]string{
		"Bounds", "Keys", "Patterns", "MessageBackPressure", "LastMessage", "Answers",
		"BackendClose", "NoPoll", "Cancel", "Revoke", "Only", "Connect", "Churn", "Together",
	}, besideStandIn...))
	return h
}

// besideStandIn names what the stand-in, which is within one process, cannot have, and a few checks
// that move bytes and messages: what a commit is tested with.
var besideStandIn = []string{
	"Lengths", "MessageOrder", "RevokeUnderWrites", "PingPong", "PeerClose", "PeerKilled",
	"PeerFrozen", "RevokeFrozen", "RevokeKilled", "RevokeParked", "Random",
}

// inGuest is a list of checks where the machine is emulated: all together they move more bytes than
// such a one does in minutes. On others it is all.
func inGuest(checks []string) []string {
	if !machine.InGuest() {
		return nil
	}
	return checks
}

func realConfig() Config {
	at := 0
	if os.Getenv(deviceVariable) != "" {
		at = 1
	}
	devices, err := machine.VerbsDevices(at + 1)
	if err != nil {
		return Config{} // New says what is missing
	}
	return Config{Devices: devices[at]}
}

func startOnSecond(c *exec.Cmd) error {
	if _, err := machine.VerbsDevices(2); err == nil {
		c.Env = append(c.Env, deviceVariable+"=1")
	}
	return c.Start()
}

// TestRealHBM offers what is no device memory to a real driver: one that takes dma-bufs finds
// out, and of any other it is said what would mend it.
func TestRealHBM(t *testing.T) {
	b, err := New(realConfig())
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
		t.Fatal(err)
	}
	defer b.Close()
	pipe, other, err := os.Pipe()
	require.NoError(t, err)
	defer pipe.Close()
	defer other.Close()
	_, err = b.Register(driver.Segment{Kind: driver.HBM, Addr: 1 << 46, Len: 4096,
		DMABuf: &driver.DMABuf{FD: int(pipe.Fd())}})
	var u *driver.UnavailableError
	if able := b.Caps().Pairs[driver.HBM] != 0; err == nil || errors.As(err, &u) == able {
		t.Errorf("a driver that takes dma-bufs: %v; it says %v", able, err)
	}
	t.Log(err)
}

func TestRealConformance(t *testing.T) { drivertest.Run(t, realHarness) }

func TestSoakRealConformance(t *testing.T) { drivertest.Run(t, soakHarness()) }

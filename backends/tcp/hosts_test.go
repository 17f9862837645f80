// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"math/rand/v2"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/machine"
)

// Of two hosts, each has addresses that the other finds.
var (
	hostHarness = drivertest.Harness{
		Name: "tcp-host",
		New: func() (driver.Backend, error) {
			return New(Config{Plaintext: true, Listen: ":0"})
		},
		Wirings: drivertest.Processes,
		Guards:  true,
	}
	secureHostHarness = drivertest.Harness{
		Name: "tcp-tls-host",
		New: func() (driver.Backend, error) {
			return New(Config{TLS: sharedTLS, Listen: ":0"})
		},
		Wirings: drivertest.Processes,
		Guards:  true,
		Without: secureHarness.Without,
	}
)

// TestTimedBetweenHosts is over a cable between two network namespaces: addresses differ.
func TestTimedBetweenHosts(t *testing.T) { overCable(t, hostHarness, drivertest.Streaming...) }

func TestTimedBetweenHostsSecure(t *testing.T) {
	overCable(t, secureHostHarness, drivertest.Streaming...)
}

func TestSoakBetweenHosts(t *testing.T)       { overCable(t, hostHarness) }
func TestSoakBetweenHostsSecure(t *testing.T) { overCable(t, secureHostHarness) }

func overCable(t *testing.T, h drivertest.Harness, only ...string) {
	t.Helper()
	far := betweenHosts(t)
	if far == nil {
		return
	}
	h.Start, h.Only = far.Start, only
	drivertest.Run(t, h)
}

// lines are what a line can be while the memory is revoked: slow, far away and lossy, and silent
// one way, in the words of tc.
var lines = []string{
	"tbf rate 20mbit burst 32kbit latency 50ms",
	"netem delay 20ms 10ms loss 2%",
	"netem loss 100%",
}

// TestSoakRealStressOverBadLines is the stress of revokes over a cable of which an end turns bad,
// or of which connections end, where the kernel can make such lines.
func TestSoakRealStressOverBadLines(t *testing.T) {
	far := betweenHosts(t, netem)
	if far == nil {
		return
	}
	h := hostHarness
	h.Only, h.Start = []string{"Random"}, far.Start
	h.Disturb = func(b driver.Backend, random *rand.Rand) (mend func()) {
		turn := func(end int, args string) {
			tc := func() error {
				out, err := exec.Command("tc", strings.Fields(args)...).CombinedOutput()
				require.NoError(t, err, "%s: %s", args, out)
				return nil
			}
			if end == 0 {
				_ = tc()
				return
			}
			require.NoError(t, far.Do(tc))
		}
		end, kind := random.IntN(2), random.IntN(len(lines)+1)
		if kind == len(lines) {
			return breakConns(b, random)
		}
		turn(end, "qdisc add dev "+cableDevice+" root "+lines[kind])
		return func() { turn(end, "qdisc del dev "+cableDevice+" root") }
	}
	drivertest.Run(t, h)
}

// netem makes sure that the kernel can make bad lines.
func netem(pair *machine.Pair) error {
	return pair.Near.Do(func() error {
		for _, line := range lines {
			for _, do := range []string{"add", "del"} {
				args := "qdisc " + do + " dev " + cableDevice + " root " + line
				out, err := exec.Command("tc", strings.Fields(args)...).CombinedOutput()
				if err != nil {
					return &driver.UnavailableError{Backend: "netem",
						Fix:    "modprobe sch_netem sch_tbf, or make guest",
						Reason: strings.TrimSpace(string(out)) + " " + err.Error()}
				}
			}
		}
		return nil
	})
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/machine"
)

// needPair skips where there are no two RDMA devices. It returns the flags that put a
// process at each.
func needPair(t *testing.T) []string {
	t.Helper()
	devices, err := machine.VerbsDevices(2)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	return []string{"--backend", "rdma:devices=" + devices[0], "--peer-backend",
		"rdma:devices=" + devices[1]}
}

// TestAutoOpensNoRDMA: for a peer of this host nobody asked for its ports.
func TestAutoOpensNoRDMA(t *testing.T) {
	o := sluice(t, "explain")
	if o.status != 0 || !strings.Contains(o.stdout, "rdma") ||
		!strings.Contains(o.stdout, "not asked: it opens a port") {
		t.Errorf("%+v", o)
	}
}

func TestRealNamesThatVerbsDoNotKnow(t *testing.T) {
	way := needPair(t)
	o := sluice(t, "replay", "--backend", way[1], "--peer-backend", "rdma:devices=nonsense")
	if o.status != statusFailed || o.stdout != "" ||
		!strings.Contains(o.stderr, "rdma backend unavailable") ||
		!strings.Contains(o.stderr, "(to mend: ") {
		t.Errorf("%+v", o)
	}
}

func TestRealReplay(t *testing.T) {
	r := replayReport(t, append([]string{"--trace", smallTrace(t, 16), "--requests", "16",
		"--abort-rate", "0.5"}, needPair(t)...)...)
	wantNumbers(t, r, map[string]float64{"requests": 16, "aborted": 8, "mismatches": 0,
		"leaked": 0})
	require.Equal(t, "rdma", r["route"])
}

// TestSoakRealReplayOverACutWire: it goes down and comes back while bytes are on it. A replay that
// ended before the test came to cut the wire is not one of these.
func TestSoakRealReplayOverACutWire(t *testing.T) {
	way := needPair(t)
	w, err := machine.NewWire(0)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	defer w.Mend()
	for range 5 {
		if replayOverACutWire(t, w, way) > 0 {
			return
		}
	}
	t.Error("no replay lasts until the wire is cut")
}

// replayOverACutWire returns how often the wire was cut.
func replayOverACutWire(t *testing.T, w machine.Wire, way []string) int {
	t.Helper()
	args := slices.Concat([]string{"replay", "--model", smallModel, "--trace", smallTrace(t, 16),
		"--requests", "16"}, way)
	c, stdout, stderr := command(t, args...)
	require.NoError(t, c.Start())
	awaitChildren(t, c.Process.Pid, 2)
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	for cuts, next := 0, sent(t)+4e6; ; {
		select {
		case err := <-ended:
			require.Zero(t, status(t, err), "after %d cuts, stderr %q", cuts, stderr)
			require.Contains(t, stdout.String(), "mismatches  0")
			return cuts
		case <-time.After(50 * time.Millisecond):
		}
		if sent(t) < next {
			continue
		}
		cuts, next = cuts+1, next+40e6
		require.NoError(t, w.Down())
		time.Sleep(700 * time.Millisecond)
		require.NoError(t, w.Up())
	}
}

// sent is how many bytes have gone over the guest's first wire.
func sent(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile("/sys/class/net/eth0/statistics/tx_bytes")
	require.NoError(t, err)
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	require.NoError(t, err)
	return n
}

// TestRealBench measures beside perftest, which a busy machine may not end in time.
func TestRealBench(t *testing.T) {
	backend := needPair(t)[1]
	o := sluice(t, "bench", "--json", "--seconds", "0.6", "--size", "656", "--batch", "256",
		"--gather", "--spread", "1MiB", "--backend", backend)
	rows := benchRows(t, o)
	if row := rows["sluice-rdma"]; row["gbps"] == nil || rows["perftest"] == nil {
		t.Errorf("%+v", o)
	}
}

func TestRealExplainAndDoctor(t *testing.T) {
	way := needPair(t)
	device, peer := strings.TrimPrefix(way[1], "rdma:devices="), strings.TrimPrefix(way[3],
		"rdma:devices=")
	o := sluice(t, "explain", "--backend", way[1])
	if o.status != 0 || !strings.Contains(o.stdout, "* rdma") ||
		!strings.Contains(o.stdout, device) {
		t.Errorf("%+v", o)
	}
	o = sluice(t, "explain", "--backend", way[1], "--remote", "hbm")
	if o.status != statusFailed || !strings.Contains(o.stdout, "no device memory to ask with") {
		t.Errorf("%+v", o)
	}
	o = sluice(t, "doctor")
	for _, want := range []string{"rdma " + device, "rdma-gids " + peer, "takes "} {
		if o.status != 0 || !strings.Contains(o.stdout, want) {
			t.Errorf("no %q in %+v", want, o)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
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

// TestMachineWithoutVerbs: no library, and no device on a machine without RDMA.
func TestMachineWithoutVerbs(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "libibverbs.so.1"), nil, 0o644))
	without := func(args ...string) outcome {
		c, stdout, stderr := command(t, args...)
		c.Env = append(c.Env, "LD_LIBRARY_PATH="+dir)
		err := c.Run()
		return outcome{status(t, err), stdout.String(), stderr.String()}
	}
	runs := map[string]func(...string) outcome{"no library": without}
	if _, err := machine.VerbsDevices(1); err != nil {
		runs["no device"] = func(args ...string) outcome { return sluice(t, args...) }
	}
	for name, run := range runs {
		o := run("replay", "--backend", "rdma")
		if o.status != statusFailed || o.stdout != "" ||
			!strings.HasPrefix(o.stderr, "sluice replay: rdma backend unavailable: ") ||
			!strings.Contains(o.stderr, "(to mend: ") || strings.Count(o.stderr, "\n") != 1 {
			t.Errorf("%s: %+v", name, o)
		}
		if o := run("explain", "--backend", "rdma"); o.status != statusFailed ||
			!strings.Contains(o.stdout, "no: rdma backend unavailable") {
			t.Errorf("%s: %+v", name, o)
		}
		r := decode(t, run("doctor", "--json").stdout).(map[string]any)
		for _, b := range r["backends"].([]any) {
			if b := b.(map[string]any); b["name"] == "rdma" && b["state"] != "missing" &&
				b["state"] != "not built" {
				t.Errorf("%s: %v", name, b)
			}
		}
	}
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
	way := needPair(t)
	r := replayReport(t, append([]string{"--trace", smallTrace(t, 6), "--requests", "6"},
		way...)...)
	wantNumbers(t, r, map[string]float64{"requests": 6, "aborted": 0, "mismatches": 0,
		"blocks_leaked": 0})
	if r["route"] != "rdma" {
		t.Errorf("route %v", r["route"])
	}
	checkAborts(t, replayReport(t, append([]string{"--trace", smallTrace(t, 16), "--requests", "16",
		"--abort-rate", "0.5"}, way...)...))
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

// awaitTraffic returns when a process that was just started moves bytes. What it says instead is
// in stderr.
func awaitTraffic(t *testing.T, stderr fmt.Stringer) {
	t.Helper()
	if !machine.InGuest() {
		time.Sleep(2 * time.Second)
		return
	}
	for begun, before := time.Now(), sent(t); sent(t) < before+
		1e6; time.Sleep(50 * time.Millisecond) {
		if time.Since(begun) > 90*time.Second {
			t.Fatalf("nothing goes over the wire, stderr %q", stderr)
		}
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

// busy is a replay of so many requests, with bytes under way most of the time.
func busy(t *testing.T, requests int) []string {
	return []string{"replay", "--model", smallModel, "--requests", fmt.Sprint(requests), "--trace",
		smallTrace(t, requests), "--timeout", answerLimit.String(), "--overlap"}
}

func TestRealSignalsEndCleanly(t *testing.T) {
	way := needPair(t)
	c, stdout, stderr := command(t, append(busy(t, 500), way...)...)
	require.NoError(t, c.Start())
	pids := awaitChildren(t, c.Process.Pid, 2)
	awaitTraffic(t, stderr)
	require.NoError(t, c.Process.Signal(syscall.SIGINT))
	start := time.Now()
	got := status(t, c.Wait())
	if took := time.Since(start); got != statusInterrupted || took > noticed ||
		stdout.String() != "" || !strings.Contains(stderr.String(), "interrupted") {
		t.Errorf("status %d after %v, stdout %q, stderr %q", got, took, stdout, stderr)
	}
	wantGone(t, pids)
}

// TestRealDeadProcessIsNamed: killed while bytes are under way.
func TestRealDeadProcessIsNamed(t *testing.T) {
	way := needPair(t)
	c, stdout, stderr := command(t, append(busy(t, 500), way...)...)
	require.NoError(t, c.Start())
	pids := awaitChildren(t, c.Process.Pid, 2)
	awaitTraffic(t, stderr)
	victim := awaitRole(t, pids, "replay-decode")
	require.NoError(t, syscall.Kill(victim, syscall.SIGKILL))
	start := time.Now()
	got := status(t, c.Wait())
	if took := time.Since(start); got != statusFailed || took > noticed ||
		stdout.String() != "" ||
		!strings.Contains(stderr.String(), fmt.Sprintf("sluice replay: decode process (pid %d)",
			victim)) {
		t.Errorf("status %d after %v, stdout %q, stderr %q", got, took, stdout, stderr)
	}
	wantGone(t, pids)
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

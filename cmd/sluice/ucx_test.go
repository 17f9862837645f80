// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/ucx"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// needUCX skips where there is none.
func needUCX(t *testing.T) {
	t.Helper()
	if _, err := ucx.Examine(ucx.Config{}); err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
}

// without runs a command as on a machine where a library cannot be loaded.
func without(t *testing.T, library string, args ...string) outcome {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, library), nil, 0o644))
	c, stdout, stderr := command(t, args...)
	c.Env = append(c.Env, "LD_LIBRARY_PATH="+dir)
	err := c.Run()
	return outcome{status(t, err), stdout.String(), stderr.String()}
}

// TestMachineWithoutALibrary: each command says which backend is not there, and what mends that;
// others go on without it.
func TestMachineWithoutALibrary(t *testing.T) {
	for backend, library := range map[string]string{"ucx": "libucp.so.0",
		"rdma": "libibverbs.so.1"} {
		said := backend + " backend unavailable: "
		o := without(t, library, "replay", "--backend", backend)
		if o.status != statusFailed || o.stdout != "" ||
			!strings.HasPrefix(o.stderr, "sluice replay: "+said) ||
			!strings.Contains(o.stderr, "(to mend: ") || strings.Count(o.stderr, "\n") != 1 {
			t.Errorf("%s: %+v", backend, o)
		}
		o = without(t, library, "explain", "--backend", backend)
		require.Equal(t, statusFailed, o.status)
		require.Contains(t, o.stdout, "no: "+said)
		r := decode(t, without(t, library, "doctor", "--json").stdout).(map[string]any)
		for _, b := range r["backends"].([]any) {
			if b := b.(map[string]any); b["name"] == backend && b["state"] != "missing" &&
				b["state"] != "not built" {
				t.Errorf("%v", b)
			}
		}
		if withCgo && backend == "ucx" {
			c := checkNamed(t, r, "libucp")
			if c["state"] != "missing" || c["found"] == "" || c["fix"] == "" {
				t.Errorf("%v", c)
			}
		}
	}
	o := without(t, "libucp.so.0", "replay", "--model", smallModel, "--requests", "2", "--trace",
		smallTrace(t, 2))
	if o.status != 0 || !strings.Contains(o.stdout, "route       shm") {
		t.Errorf("%+v", o)
	}
}

func checkNamed(t *testing.T, report map[string]any, name string) map[string]any {
	t.Helper()
	for _, c := range report["checks"].([]any) {
		if c := c.(map[string]any); c["name"] == name {
			return c
		}
	}
	t.Fatalf("no check %s in %v", name, report)
	return nil
}

func TestDoctorOnUCX(t *testing.T) {
	needUCX(t)
	r := decode(t, ok(t, sluice(t, "doctor", "--json")).stdout).(map[string]any)
	for name, want := range map[string]string{"libucp": "UCX 1.", "ucx-transports": "tcp over "} {
		require.Contains(t, checkNamed(t, r, name)["found"], want)
	}
	o := sluice(t, "doctor", "--backend", "ucx:transports=tcp,nonsense,devices=lo")
	if o.status != statusFailed || !strings.Contains(o.stdout, "not on this machine: nonsense") {
		t.Errorf("%+v", o)
	}
}

func TestReplayOverUCX(t *testing.T) {
	needUCX(t)
	t.Parallel()
	r := replayReport(t, "--trace", smallTrace(t, 16), "--requests", "16", "--abort-rate", "0.5",
		"--backend", "ucx:transports=tcp,devices=lo")
	wantNumbers(t, r, map[string]float64{"requests": 16, "aborted": 8, "mismatches": 0,
		"leaked": 0})
	require.Equal(t, "ucx", r["route"])
}

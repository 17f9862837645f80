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
	if _, err := ucx.Version(""); err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
}

// withoutUCX runs a command as on a machine where libucp cannot be loaded.
func withoutUCX(t *testing.T, args ...string) outcome {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "libucp.so.0"), nil, 0o644))
	c, stdout, stderr := command(t, args...)
	c.Env = append(c.Env, "LD_LIBRARY_PATH="+dir)
	err := c.Run()
	return outcome{status(t, err), stdout.String(), stderr.String()}
}

func TestMachineWithoutUCX(t *testing.T) {
	const said = "ucx backend unavailable: "
	for _, args := range [][]string{{"replay", "--backend", "ucx"},
		{"replay", "--backend", "ucx:transports=tcp"}} {
		o := withoutUCX(t, args...)
		if o.status != statusFailed || o.stdout != "" ||
			!strings.HasPrefix(o.stderr, "sluice "+args[0]+": "+said) ||
			!strings.Contains(o.stderr, "(to mend: ") {
			t.Errorf("%v: %+v", args, o)
		}
	}
	o := withoutUCX(t, "explain", "--backend", "ucx")
	require.Contains(t, o.stdout, "no: "+said)
	o = withoutUCX(t, "replay", "--model", smallModel, "--requests", "2", "--trace",
		smallTrace(t, 2))
	if o.status != 0 || !strings.Contains(o.stdout, "route       shm") {
		t.Errorf("%+v", o)
	}
	if !withCgo {
		return // TestDoctorWithoutCgo has what doctor says then
	}
	r := decode(t, withoutUCX(t, "doctor", "--json").stdout).(map[string]any)
	c := checkNamed(t, r, "libucp")
	if c["state"] != "missing" || c["found"] == "" || c["fix"] == "" {
		t.Errorf("%v", c)
	}
	for _, b := range r["backends"].([]any) {
		if b := b.(map[string]any); b["name"] == "ucx" && (b["state"] != "missing" ||
			len(b["notes"].([]any)) != 1) {
			t.Errorf("%v", b)
		}
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
	c, stdout, stderr := command(t, "doctor", "--json")
	c.Env = append(c.Env, "UCX_LOG_LEVEL=fatal", "UCX_TLS=secret")
	if got := status(t, c.Run()); got != 0 {
		t.Fatalf("status %d, %s", got, stderr)
	}
	r := decode(t, stdout.String()).(map[string]any)
	for name, want := range map[string]string{"libucp": "UCX 1.", "ucx-transports": "tcp over ",
		"ucx-environment": "UCX reads UCX_LOG_LEVEL; without effect, because the backend sets " +
			"these itself: UCX_TLS"} {
		if found := checkNamed(t, r, name)["found"].(string); !strings.Contains(found, want) {
			t.Errorf("%s: %q, want %q", name, found, want)
		}
	}
	if strings.Contains(stdout.String(), "secret") {
		t.Errorf("the value of a variable is shown:\n%s", stdout)
	}
	o := sluice(t, "doctor", "--backend", "ucx:transports=tcp,nonsense,devices=lo")
	if o.status != statusFailed || !strings.Contains(o.stdout, "not on this machine: nonsense") {
		t.Errorf("%+v", o)
	}
}

// TestNamesThatUCXDoesNotKnow: alone it fails late, beside others it is ignored.
func TestNamesThatUCXDoesNotKnow(t *testing.T) {
	needUCX(t)
	for _, args := range [][]string{
		{"replay", "--backend", "ucx:transports=nonsense"},
	} {
		o := sluice(t, args...)
		if o.status != statusFailed || o.stdout != "" ||
			!strings.Contains(o.stderr,
				"this machine has no nonsense: there are transports") ||
			!strings.Contains(o.stderr, "tcp") || !strings.Contains(o.stderr, "ucx_info -d") {
			t.Errorf("%v: %+v", args, o)
		}
	}
}

// overUCX is how commands are told to go by UCX, over the loopback device.
var overUCX = []string{"--backend", "ucx:transports=tcp,devices=lo"}

func TestReplayOverUCX(t *testing.T) {
	needUCX(t)
	t.Parallel()
	r := replayReport(t, append([]string{"--trace", smallTrace(t, 6), "--requests", "6"},
		overUCX...)...)
	wantNumbers(t, r, map[string]float64{"requests": 6, "aborted": 0, "mismatches": 0,
		"blocks_leaked": 0})
	require.Equal(t, "ucx", r["route"])
	checkAborts(t, replayReport(t, append([]string{"--trace", smallTrace(t, 16), "--requests", "16",
		"--abort-rate", "0.5"}, overUCX...)...))
}

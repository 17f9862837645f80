// SPDX-License-Identifier: Apache-2.0

package main

import (
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/byname"
)

func TestDoctorJSON(t *testing.T) {
	o := sluice(t, "doctor", "--json")
	if o.status != 0 || o.stderr != "" {
		t.Fatalf("%+v", o)
	}
	r := decode(t, o.stdout)
	wantKeys(t, "report", r, "machine", "backends", "checks", "devices")
	object := r.(map[string]any)
	wantKeys(t, "machine", object["machine"], "kernel", "arch", "cpu", "cpus", "numa_nodes",
		"memory_total", "memory_available")
	wantKeys(t, "check", object["checks"].([]any)[0], "name", "state", "found", "why", "fix",
		"backends")
	wantKeys(t, "backend", object["backends"].([]any)[0], "name", "state", "notes")
	for i, known := range byname.All() {
		b := object["backends"].([]any)[i].(map[string]any)
		require.Equal(t, known.Name, b["name"])
		require.Equal(t, isBuilt(known), b["state"] != "not built", "%v", b)
	}
}

// TestDoctorWithoutCgo: backends that need cgo are not shown as if they were there, and the
// report says how to get them.
func TestDoctorWithoutCgo(t *testing.T) {
	before := withCgo
	withCgo = false
	t.Cleanup(func() { withCgo = before })
	var out, errs strings.Builder
	require.Zero(t, run(t.Context(), []string{"doctor"}, &out, &errs), errs.String())
	for _, name := range []string{"ucx", "rdma", "gds", "cuda"} {
		require.Regexp(t, `\n`+name+` +not built +not in this build: needs cgo`, out.String())
	}
	require.Contains(t, out.String(), "cgo (rdma, ucx, cuda, gds): these backends call C "+
		"libraries\n"+
		"      CGO_ENABLED=1 go build")
	require.NotContains(t, out.String(), "libucx0", "of no use to this build")
}

func TestExplain(t *testing.T) {
	o := sluice(t, "explain")
	if o.status != 0 || !strings.Contains(o.stdout, "* shm") ||
		!strings.Contains(o.stdout, "one process") {
		t.Errorf("%+v", o)
	}
	o = sluice(t, "explain", "--same-host=false", "--json")
	require.Zero(t, o.status, "%+v", o)
	x := decode(t, o.stdout)
	wantKeys(t, "explanation", x, "peer", "local", "remote", "same_host", "chosen", "why",
		"candidates")
	candidates := x.(map[string]any)["candidates"].([]any)
	require.Len(t, candidates, len(byname.All()))
	for _, c := range candidates {
		wantKeys(t, "candidate", c, "backend", "usable", "last_resort", "reason", "estimate_ns",
			"rate", "measured")
		if c := c.(map[string]any); c["backend"] == "shm" && (c["usable"] != false ||
			c["reason"] != "stays within one host") {
			t.Errorf("shm to another host: %v", c)
		}
	}
	if o := sluice(t, "explain", "--local", "hbm", "--backend", "shm"); o.status != statusFailed ||
		!strings.Contains(o.stdout, "no backend can") {
		t.Errorf("%+v", o)
	}
}

// TestExplainChain finds the way to a file of a peer, to which no backend leads alone.
func TestExplainChain(t *testing.T) {
	o := sluice(t, "explain", "--remote", "file")
	require.Zero(t, o.status, "%+v", o)
	require.Regexp(t, `(?m)^\* staged .*dram -shm- dram of the peer -its engine- file`, o.stdout)
	o = sluice(t, "explain", "--local", "file", "--same-host=false")
	require.Zero(t, o.status, "%+v", o)
	require.Regexp(t, `(?m)^\* staged .*file -posix- dram -(tcp|ucx|rdma)- dram`, o.stdout)
	o = sluice(t, "explain", "--remote", "file", "--backend", "shm")
	require.Equal(t, statusFailed, o.status, "%+v", o)
	require.Contains(t, o.stderr, "no backend can move these bytes")
}

func TestVersion(t *testing.T) {
	require.Contains(t, ok(t, sluice(t, "--version")).stdout, "sluice version ")
	said := ok(t, sluice(t, "version")).stdout
	require.Regexp(t, `(?m)^version +\S+\ncommit +\S.*\nbuilt +go1\S+, linux/\w+$`, said)
	for _, b := range byname.All() {
		require.Equal(t, isBuilt(b), regexp.MustCompile(`backends.*\b`+b.Name+`\b`).MatchString(said))
	}
}

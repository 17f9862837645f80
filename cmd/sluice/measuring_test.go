// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

func TestRowsArePrintedWhenTheRestFails(t *testing.T) {
	var out, said bytes.Buffer
	root := &cobra.Command{Use: "sluice"}
	c := &cobra.Command{Use: "bench"}
	root.AddCommand(c)
	c.SetOut(&out)
	c.SetErr(&said)
	failed := errors.New("the peer is gone")
	m := startMeasuring(c, 90*time.Second)
	require.Contains(t, said.String(), "bench takes about 1m30s")
	require.ErrorIs(t, m.print(bench.Text, nil, failed), failed)
	require.Empty(t, out.String())
	rows := []bench.Result{{Backend: "shm", Op: "write", Size: 64, Batch: 1}}
	require.ErrorIs(t, m.print(bench.Text, rows, failed), failed)
	require.Contains(t, out.String(), "shm  write   64B")
}

func TestNoteOfABusyMachine(t *testing.T) {
	for want, after := range map[string]processors{
		"":                                 {all: 20, used: 10, own: 9.5},
		"others took 40 % of its":          {all: 20, used: 10, own: 2},
		"the host gave it 5 % less (steal": {all: 20, used: 10, own: 10, stolen: 1},
	} {
		got := othersNote(processors{}, after)
		require.Equal(t, want == "", got == "", got)
		require.Contains(t, got, want)
	}
	require.Positive(t, readProcessors().all)
}

// withoutNetwork runs a command where the loopback is down.
func withoutNetwork(t *testing.T, args ...string) outcome {
	t.Helper()
	c, stdout, stderr := command(t, args...)
	c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNET}
	err := c.Run()
	if errors.Is(err, syscall.EPERM) {
		drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "netns",
			Reason: "network namespaces are made by root", Fix: "run the test as root"})
	}
	return outcome{status(t, err), stdout.String(), withoutProgress(stderr)}
}

// TestWithoutANetwork: doctor, explain and bench agree.
func TestWithoutANetwork(t *testing.T) {
	const cure = "ip link set lo up"
	o := withoutNetwork(t, "doctor")
	require.Contains(t, o.stdout, cure)
	require.Regexp(t, `(?m)^tcp +yes +missing `, o.stdout)
	explained := withoutNetwork(t, "explain", "--backend", "tcp")
	require.Contains(t, explained.stdout, cure)
	bench := withoutNetwork(t, "bench", "--backend", "tcp", "--rounds", "1")
	require.Equal(t, statusFailed, bench.status)
	require.Contains(t, bench.stderr, cure)

	near := strings.Contains(o.stdout, "ucx-near") // where there is UCX
	if near {
		require.Regexp(t, `(?m)^ucx +yes +limited +ucx-far: none`, o.stdout)
		ok(t, withoutNetwork(t, "bench", "--backend", "ucx", "--rounds", "1", "--size", "4KiB"))
	}
}

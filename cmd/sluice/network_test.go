// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

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

// TestWithoutANetwork: doctor and explain agree.
func TestWithoutANetwork(t *testing.T) {
	const cure = "ip link set lo up"
	o := withoutNetwork(t, "doctor")
	require.Contains(t, o.stdout, cure)
	require.Regexp(t, `(?m)^tcp +missing `, o.stdout)
	explained := withoutNetwork(t, "explain", "--backend", "tcp")
	require.Contains(t, explained.stdout, cure)
	explained = withoutNetwork(t, "explain", "--same-host=false")
	require.Contains(t, explained.stdout, "no backend can")
	require.Contains(t, explained.stdout, cure)

	if strings.Contains(o.stdout, "UCX 1.") {
		require.Regexp(t, `(?m)^ucx +(limited|missing) .*ucx-transports: none`, o.stdout)
	}
}

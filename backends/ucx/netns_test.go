// SPDX-License-Identifier: Apache-2.0

package ucx_test

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/netns"
)

// betweenHosts runs the test once more on a host of its own, where the backend of
// this process finds what that host has and no more. There it returns the host at
// the other end of the cable; here it returns nil, when that is over.
func betweenHosts(t *testing.T) *netns.Host {
	t.Helper()
	far, err := netns.BetweenHosts(t, func(*netns.Pair) error { // skips where there is no UCX
		b, err := ucx.New(ucx.Config{})
		if err != nil {
			return err
		}
		return b.Close()
	})
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	return far
}

// TestTimedBetweenHosts is over a cable. Nobody tells UCX which: it has to find the device, and
// not to take what shares memory.
func TestTimedBetweenHosts(t *testing.T) { overCable(t, drivertest.Streaming...) }

func TestSoakBetweenHosts(t *testing.T) { overCable(t) }

func overCable(t *testing.T, only ...string) {
	t.Helper()
	far := betweenHosts(t)
	if far == nil {
		return
	}
	drivertest.Run(t, drivertest.Harness{
		Name:    "ucx", // the far side's backend: with the same Config, which is none
		New:     func() (driver.Backend, error) { return ucx.New(ucx.Config{}) },
		Start:   far.Start,
		Wirings: drivertest.Processes,
		Guards:  true,
		Only:    only,
	})
}

// program is this test binary, under a name that other processes find as well.
func program(t *testing.T) string {
	t.Helper()
	path, err := os.Executable()
	require.NoError(t, err)
	return path
}

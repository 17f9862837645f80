// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver/drivertest"
)

// TestNetwork: hosts reach each other as their lines are, whoever runs it.
func TestNetwork(t *testing.T) {
	ran, err := AsRoot(t)
	if err == nil && ran {
		return
	}
	var w *Network
	if err == nil {
		w, err = NewNetwork(3, 1)
	}
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	defer func() { require.NoError(t, w.Close()) }()
	first, second := &Pair{w.Hosts[0], w.Hosts[1]}, &Pair{w.Hosts[2], w.Hosts[1]}
	reaches(t, first)
	w.Change(1, 0, Line{Cut: true})
	require.Error(t, dial(first))
	reaches(t, second)
	w.Change(0, 1, Line{Loss: 0.1, Delay: time.Millisecond})
	reaches(t, first)
	w.Change(0, 1, Line{Loss: 1})
	require.Error(t, dial(first))
	w.Mend()
	reaches(t, first)
}

// TestAsRoot: what a run mounts and leaves is not there afterwards.
func TestAsRoot(t *testing.T) {
	const variable = "SLUICE_TEST_MOUNT"
	dir := os.Getenv(variable)
	if dir == "" {
		dir = t.TempDir()
		t.Setenv(variable, dir)
	}
	ran, err := AsRoot(t)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	if !ran {
		require.NoError(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"))
		return
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	require.NoError(t, err)
	require.NotContains(t, string(mounts), dir)
}

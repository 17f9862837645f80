// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestDoctorTuneInterrupted: Ctrl-C leaves no file, also none that is half written. Without cgo
// there is one way to copy, and nothing to measure that could be interrupted.
func TestDoctorTuneInterrupted(t *testing.T) {
	dir := t.TempDir()
	c, stdout, stderr := command(t, "doctor", "--tune", filepath.Join(dir, "copy.json"))
	require.NoError(t, c.Start())
	require.Eventually(t, func() bool {
		list, _ := os.ReadDir(dir)
		return len(list) > 0 // the one beside its place, before anything is measured
	}, time.Minute, time.Millisecond)
	require.NoError(t, c.Process.Signal(syscall.SIGINT))
	require.Equal(t, statusInterrupted, status(t, c.Wait()), stderr)
	require.Contains(t, stderr.String(), "interrupted")
	require.Empty(t, stdout.String())
	list, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, list)
}

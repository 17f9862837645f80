// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"context"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/testing/fakeverbs"
	"github.com/sluicehq/sluice/internal/testing/standin"
)

// runOverStandIn builds a program of testdata with the data plane, and runs it over the stand-in.
func runOverStandIn(t *testing.T, name string, flags ...string) {
	t.Helper()
	dir := t.TempDir()
	exe := filepath.Join(dir, name)
	args := append([]string{"-std=gnu11", "-Wall", "-Wextra", "-Werror", "-I.",
		"-Itestdata/fakeverbs", "-o", exe, "testdata/" + name + ".c"}, flags...)
	standin.Compile(t, append(append(args, sourceFiles(t)...), "-ldl", "-lpthread")...)
	library, control := fakeverbs.Compile(t, dir)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	out, err := exec.CommandContext(ctx, exe, library, control).CombinedOutput()
	require.NoErrorf(t, err, "%s", out)
}

// TestRoomForMarkAndProbe has queue pairs fail and begin while the list of built requests is full.
func TestRoomForMarkAndProbe(t *testing.T) { runOverStandIn(t, "room") }

// TestTime moves the clock of the data plane: rails share by what they were measured to move, and a
// standstill of our own process is no silence of a device.
func TestTime(t *testing.T) { runOverStandIn(t, "time", "-Wl,--wrap=sl_verbs_now") }

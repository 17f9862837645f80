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

// TestRoomForMarkAndProbe has queue pairs fail and begin while the list of built requests is full.
func TestRoomForMarkAndProbe(t *testing.T) {
	dir := t.TempDir()
	exe := filepath.Join(dir, "room")
	args := []string{"-std=gnu11", "-I.", "-Itestdata/fakeverbs", "-o", exe, "testdata/room.c"}
	standin.Compile(t, append(append(args, sourceFiles(t)...), "-ldl", "-lpthread")...)
	library, control := fakeverbs.Compile(t, dir)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	out, err := exec.CommandContext(ctx, exe, library, control).CombinedOutput()
	require.NoErrorf(t, err, "%s", out)
}

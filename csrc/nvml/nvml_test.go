// SPDX-License-Identifier: Apache-2.0

//go:build cgo && linux

package nvml

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/standin"
)

// standIn compiles the software stand-in of NVML.
func standIn(t *testing.T, flags ...string) string {
	t.Helper()
	library := filepath.Join(t.TempDir(), "libnvidia-ml-standin.so")
	standin.Compile(t, append([]string{"-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared",
		"-fPIC", "-o", library, "testdata/nvml_standin.c"}, flags...)...)
	return library
}

// TestStandIn asks twice, drivers that have all, lack newer functions (to call one would end the
// process), refuse every question, and have lost a card.
func TestStandIn(t *testing.T) {
	first := GPU{0, "Stand-in GPU 80GB", "0000:19:00.0", "9.0", 80 << 30,
		"disabled, enabled after a reset", 0}
	second := GPU{1, "Stand-in GPU 80GB", "0000:9b:00.0", "9.0", 80 << 30, "", -1}
	older := first
	older.MIG = ""
	for flag, want := range map[string]Findings{
		"-DNEW":      {"550.54.15", "12.4", []GPU{first, second}},
		"-DOLD":      {"550.54.15", "11.8", []GPU{older, second}},
		"-DREFUSE=3": {"550.54.15", "12.4", []GPU{{State: -1}, {Index: 1, State: -1}}},
		"-DLOST=1":   {"550.54.15", "12.4", []GPU{first, {Index: 1, State: -1}}},
	} {
		library := standIn(t, flag)
		for range 2 {
			f, err := Examine(library)
			require.NoError(t, err, flag)
			require.Equal(t, want, f, flag)
		}
	}
}

func TestUnavailable(t *testing.T) {
	for _, c := range []struct{ library, reason, fix string }{
		{filepath.Join(t.TempDir(), "libnvidia-ml.so.1"), "cannot open shared object file",
			"install the NVIDIA driver"},
		{standIn(t, "-DINIT=9"), "Driver Not Loaded", "modprobe nvidia"},
		{standIn(t, "-DINIT=18"), "version mismatch", "reboot"},
		{standIn(t, "-DINIT=999"), "Unknown Error", "install the NVIDIA driver"},
		{standIn(t, "-DHOLLOW"), "has no nvmlShutdown", "of one version"},
	} {
		_, err := Examine(c.library)
		var missing *driver.UnavailableError
		require.ErrorAs(t, err, &missing)
		require.Contains(t, missing.Reason, c.reason)
		require.Contains(t, missing.Fix, c.fix)
	}
}

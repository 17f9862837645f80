// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cufile

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/standin"
)

// fake builds a library from C.
func fake(t *testing.T, text string) string {
	t.Helper()
	return standin.Shared(t, "libcufile-fake.so.0", text)
}

// fakeCuFile is a library with all functions that Load must find, of which cuFileDriverOpen answers
// that result.
func fakeCuFile(t *testing.T, without, result string) string {
	t.Helper()
	names := standin.Calls(t, "SL_CUFILE_CALLS", "ret, name, args")
	require.Len(t, names, 8, "the functions that must be there")
	text := ""
	for _, name := range names {
		if name != without && name != "cuFileDriverOpen" {
			text += "int " + name + "(void) { return 1; }\n"
		}
	}
	return fake(t, text+"struct e { int err, cu; }; struct e cuFileDriverOpen(void) { return "+
		"(struct e){"+result+"}; }\n")
}

// A library that fails changes nothing, so that a later call may try another. What stands before
// cuInit is asked of another test: here the loader itself is.
func TestLoadCuFileThatFails(t *testing.T) {
	for _, c := range []struct{ name, path, reason, fix string }{
		{"missing", filepath.Join(t.TempDir(), "libcufile.so.0"), "cannot open shared object file",
			"install"},
		{"a function is missing", fakeCuFile(t, "cuFileWrite", "0, 0"),
			"has no function cuFileWrite", "install"},
		{"no driver", fakeCuFile(t, "", "5033, 0"), "cuFileDriverOpen answers 5033 (CUDA 0)",
			"nvidia-fs"},
		{"no device", fakeCuFile(t, "", "5011, 100"), "cuFileDriverOpen answers 5011 (CUDA 100)",
			"nvidia-fs"},
	} {
		reason, fix := loadLibrary(c.path)
		if !strings.Contains(reason, c.reason) || !strings.Contains(reason, c.path) ||
			!strings.Contains(fix, c.fix) {
			t.Errorf("%s: %q, %q: want %q and the path", c.name, reason, fix, c.reason)
		}
	}
}

// TestCuFileBehindCUDA wants libcufile left alone until libcuda is open.
func TestCuFileBehindCUDA(t *testing.T) {
	var u *driver.UnavailableError
	if err := Load(fakeCuFile(t, "", "0, 0")); !errors.As(err, &u) ||
		!strings.Contains(u.Reason, "libcuda.so.1 is not open") {
		t.Errorf("cuFile without CUDA: %v", err)
	}
	if library.Loaded() == nil {
		t.Error("libcufile was opened")
	}
}

// TestCuFileDeclarations holds our words against cufile.h, by the compiler.
func TestCuFileDeclarations(t *testing.T) {
	if !standin.HasHeader("cufile.h") {
		drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "gds",
			Reason: "no cufile.h to compare with",
			Fix: "pip download nvidia-cufile-cu12 nvidia-cuda-runtime-cu12, unpack them, and " +
				"name their include folders in CPATH"})
	}
	ours := standin.Facts(t, "testdata/facts.c")
	theirs := standin.Facts(t, "testdata/facts.c", "-DREAL")
	require.Equal(t, theirs, ours, "the facts of cufile.h, and ours")
	require.GreaterOrEqual(t, len(ours), 50)
}

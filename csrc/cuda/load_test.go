// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

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
	return standin.Shared(t, "libcuda-fake.so.1", text)
}

// fakeCUDA is a library with all functions that Load looks for, of which cuInit answers
// that result.
func fakeCUDA(t *testing.T, without, result string) string {
	t.Helper()
	text := ""
	names := standin.Calls(t, "SL_CUDA_CALLS", "name, args")
	require.GreaterOrEqual(t, len(names), 20, "%v", names)
	for _, name := range names {
		switch name {
		case without, "cuInit", "cuGetErrorName", "cuGetErrorString":
		default:
			text += "int " + name + "(void) { return 999; }\n"
		}
	}
	return fake(t, text+"int cuInit(unsigned f) { return "+result+"; }\n"+
		`int cuGetErrorName(int r, const char **n) { *n = "CUDA_ERROR_NO_DEVICE"; return 0; }`+"\n"+
		`int cuGetErrorString(int r, const char **n) { *n = "no CUDA-capable device is detected"; return 0; }`)
}

// A library that fails changes nothing, so that a later call may try another.
func TestLoadCUDAThatFails(t *testing.T) {
	for _, c := range []struct{ name, path, reason, fix string }{
		{"missing", filepath.Join(t.TempDir(), "libcuda.so.1"), "cannot open shared object file",
			"driver"},
		{"a function is missing", fakeCUDA(t, "cuLaunchKernel", "0"),
			"has no function cuLaunchKernel", "driver"},
		{"events", fakeCUDA(t, "cuEventRecord", "0"), "has no function cuEventRecord", "driver"},
		{"an old name", fakeCUDA(t, "cuMemAlloc_v2", "0"), "has no function cuMemAlloc_v2",
			"driver"},
		{"no device", fakeCUDA(t, "", "100"), "cuInit answers 100, CUDA_ERROR_NO_DEVICE: no " +
			"CUDA-capable device", "nvidia-smi"},
	} {
		err := Load(c.path)
		var u *driver.UnavailableError
		if !errors.As(err, &u) || u.Backend != "cuda" || !strings.Contains(u.Fix, c.fix) ||
			!strings.Contains(u.Reason, c.reason) || !strings.Contains(u.Reason, c.path) {
			t.Errorf("%s: %v, want an UnavailableError with %q and the path", c.name, err, c.reason)
		}
	}
	var u *driver.UnavailableError
	if _, err := Open(0); !errors.As(err, &u) {
		t.Errorf("a device without a library: %v", err)
	}
}

// TestCUDADeclarations holds our words against cuda.h, by the compiler.
func TestCUDADeclarations(t *testing.T) {
	if !standin.HasHeader("cuda.h") {
		drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "cuda",
			Reason: "no cuda.h to compare with",
			Fix: "pip download nvidia-cuda-runtime-cu12, unpack it, and name its include " +
				"folder in CPATH"})
	}
	require.Equal(t, standin.Facts(t, "testdata/facts.c", "-DREAL"),
		standin.Facts(t, "testdata/facts.c"), "the facts of cuda.h, and ours")
}

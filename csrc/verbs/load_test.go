// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

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
	return standin.Shared(t, "libibverbs-fake.so.1", text)
}

func TestLoadVerbs(t *testing.T) {
	f := standin.OpenVerbs(t, 2, Load)
	missing := filepath.Join(t.TempDir(), "libibverbs.so.1")
	for _, c := range []struct{ name, path, reason string }{
		{"missing", missing, "cannot open shared object file"},
		{"not verbs at all", fake(t, "int answer = 42;"), "has no function " +
			"ibv_get_device_list of version IBVERBS_1.1"},
		{"functions without versions", fake(t, "void *ibv_get_device_list(int *n) { "+
			"return n; }"), "has no function"},
	} {
		err := Load(c.path)
		var u *driver.UnavailableError
		if !errors.As(err, &u) || u.Backend != "rdma" || u.Fix != "apt-get install libibverbs1 "+
			"ibverbs-providers, of rdma-core 28 or later" ||
			!strings.Contains(u.Reason, c.reason) || !strings.Contains(u.Reason, c.path) {
			t.Errorf("%s: %v, want an UnavailableError with %q and the path", c.name, err, c.reason)
		}
		if n, err := Devices(); n != 2 || err != nil {
			t.Fatalf("%s: %d devices, %v, of the library that was open before", c.name, n, err)
		}
	}
	c, err := Open(testConfig(t))
	require.NoError(t, err)
	var u *driver.UnavailableError
	if err := Load(missing); !errors.As(err, &u) || !strings.Contains(u.Reason, "is in use") {
		t.Errorf("a second library beside a context: %v, want an UnavailableError", err)
	}
	require.NoError(t, c.Close())
	_ = f
}

func TestDevicesSayWhatIsMissing(t *testing.T) {
	standin.OpenVerbs(t, 0, Load)
	var u *driver.UnavailableError
	if _, err := Devices(); !errors.As(err, &u) || !strings.Contains(u.Fix, "ibverbs-providers") {
		t.Errorf("an empty list: %v, want an UnavailableError with a cure", err)
	}
}

// The library of the system can be opened, and says so where the kernel knows no RDMA.
func TestLibraryOfTheSystem(t *testing.T) {
	standin.OpenVerbs(t, 1, Load)
	t.Cleanup(func() {
		if err := Load(standin.VerbsPath()); err != nil {
			t.Error(err)
		}
	})
	if err := Load(""); err != nil {
		drivertest.SkipIfUnavailable(t, err)
		t.Fatal(err)
	}
	n, err := Devices()
	var u *driver.UnavailableError
	if n == 0 && (!errors.As(err, &u) || !strings.Contains(u.Fix, "modprobe")) {
		t.Errorf("%d devices: %v, want an UnavailableError with a cure", n, err)
	}
	t.Logf("%d devices: %v", n, err)
}

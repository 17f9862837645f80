// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/standin"
)

// fake builds a library from C.
func fake(t *testing.T, text string) string {
	t.Helper()
	return standin.Shared(t, "libucp-fake.so.0", text)
}

func version(major, minor string) string {
	return "void ucp_get_version(unsigned *a, unsigned *b, unsigned *c) { *a = " + major +
		"; *b = " + minor + "; *c = 4; }"
}

// In one test, in this order: the first library that is usable stays.
func TestLoad(t *testing.T) {
	before := library // which another test may have loaded
	library = &ring.Library{Backend: before.Backend, System: before.System, Open: before.Open}
	t.Cleanup(func() {
		if before.Loaded() == nil {
			library = before
		}
	})
	missing := filepath.Join(t.TempDir(), "libucp.so.0")
	for _, c := range []struct{ name, path, reason string }{
		{"missing", missing, "cannot open shared object file"},
		{"too old", fake(t, version("1", "9")), "is UCX 1.9.4, want 1.10"},
		{"too new", fake(t, version("2", "0")), "is UCX 2.0.4, want 1.10"},
		{"a function is missing", fake(t, version("1", "13")), "has no function " +
			"ucs_status_string"},
		{"not UCX at all", fake(t, "int answer = 42;"), "has no function"},
	} {
		err := Load(c.path)
		var u *driver.UnavailableError
		if !errors.As(err, &u) || u.Backend != "ucx" || u.Fix != "apt-get install libucx0" ||
			!strings.Contains(u.Reason, c.reason) || !strings.Contains(u.Reason, c.path) {
			t.Errorf("%s: %v, want an UnavailableError with %q and the path", c.name, err, c.reason)
		}
		if v := Version(); v != "" {
			t.Fatalf("%s: version %q of a library that cannot be used", c.name, v)
		}
	}
	for range 2 {
		if err := Load(""); err != nil {
			drivertest.SkipIfUnavailable(t, err)
			t.Fatal(err)
		}
	}
	if v := Version(); !strings.HasPrefix(v, "1.") {
		t.Errorf("version %q", v)
	}
	var u *driver.UnavailableError
	if err := Load(missing); !errors.As(err, &u) || !strings.Contains(u.Reason, "open already") {
		t.Errorf("a second library: %v, want an UnavailableError", err)
	}
}

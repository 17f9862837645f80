// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// TestMissingLibrary runs in a process of its own: this one may have loaded UCX.
func TestMissingLibrary(t *testing.T) {
	const variable, missing = "SLUICE_TEST_MISSING_UCX", "/nonexistent/libucp.so.0"
	if _, again := os.LookupEnv(variable); !again {
		c := exec.Command(os.Args[0], "-test.run=^TestMissingLibrary$", "-test.v")
		c.Env = append(os.Environ(), variable+"=1")
		out, err := c.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "--- PASS: TestMissingLibrary") {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	_, openErr := New(Config{Library: missing})
	_, examineErr := Examine(Config{Library: missing})
	for _, err := range []error{openErr, examineErr} {
		var u *driver.UnavailableError
		if !errors.As(err, &u) || u.Backend != "ucx" || u.Reason == "" || u.Fix == "" {
			t.Errorf("%v", err)
		}
	}
}

func examine(t *testing.T, c Config) Findings {
	t.Helper()
	f, err := Examine(c)
	if errors.Is(err, driver.ErrUnavailable) {
		drivertest.SkipIfUnavailable(t, err)
	}
	require.NoError(t, err)
	return f
}

func TestExamine(t *testing.T) {
	f := examine(t, Config{})
	if !strings.HasPrefix(f.Version, "1.") || !strings.Contains(f.Library, "libucp") {
		t.Errorf("library %q, version %q", f.Library, f.Version)
	}
	if !slices.Contains(f.Transports, "tcp") ||
		!slices.Contains(f.Devices, "lo") || len(f.Absent) > 0 {
		t.Errorf("%+v", f)
	}
}

// TestExamineFindsNamesThatNobodyKnows: UCX itself takes them as long as there is one
// that it knows.
func TestExamineFindsNamesThatNobodyKnows(t *testing.T) {
	f := examine(t, Config{Transports: "posix,tcp,nonsense", Devices: "lo,nowhere0"})
	if !slices.Equal(f.Absent, []string{"nonsense", "nowhere0"}) ||
		!slices.Equal(f.Transports, []string{"tcp"}) || !slices.Equal(f.Devices, []string{"lo"}) {
		t.Errorf("%+v", f)
	}
	f = examine(t, Config{Transports: "^tcp"})
	if slices.Contains(f.Transports, "tcp") || len(f.Absent) > 0 {
		t.Errorf("without tcp: %+v", f)
	}
	if _, err := Examine(Config{Transports: "a b"}); !errors.Is(err, driver.ErrBounds) {
		t.Errorf("a blank in a name: %v", err)
	}
}

func TestElsewhereHasNoLoopback(t *testing.T) {
	examine(t, Config{})
	c, err := Config{}.Elsewhere()
	if errors.Is(err, driver.ErrUnavailable) {
		drivertest.SkipIfUnavailable(t, err) // no network
	}
	require.NoError(t, err)
	require.False(t, slices.Contains(strings.Split(c.Devices, ","), "lo"), "%+v", c)
	if _, err := (Config{Devices: "lo"}).Elsewhere(); !errors.Is(err, driver.ErrUnavailable) {
		t.Errorf("without a way to another host: %v", err)
	}
}

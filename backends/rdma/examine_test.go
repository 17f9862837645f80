// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluicehq/sluice/driver"
)

// findings looks at the fixture, with a library that is there.
func findings(t *testing.T, devices string) (Findings, error) {
	t.Helper()
	return examine(Config{Devices: devices, sysfs: newFixture(t)}, func(*Config) error {
		return nil
	})
}

func TestExamine(t *testing.T) {
	f, err := findings(t, "")
	if err != nil || len(f.Devices) != 3 || f.Nodes != 2 || len(f.Problems) > 0 &&
		f.Memlock.Unlimited {
		t.Fatalf("%+v, %v", f, err)
	}
	ib, roce, soft := f.Devices[0], f.Devices[1], f.Devices[2]
	if ib.Bus != "0000:3b:00.0" || !ib.Ports[0].Chosen || !ib.Ports[0].GIDs[0].Chosen ||
		len(ib.Ports[0].Problems) > 0 {
		t.Errorf("%+v", ib)
	}
	if down := ib.Ports[1]; down.Chosen || len(down.Problems) == 0 ||
		!strings.Contains(down.Problems[0].Fix, "subnet manager") {
		t.Errorf("a port that is down: %+v", down)
	}
	chosen := 0
	for _, g := range roce.Ports[0].GIDs {
		if g.Chosen {
			chosen = g.Index
		}
		if g.Why == "" {
			t.Errorf("GID %d without a reason", g.Index)
		}
	}
	if chosen != 10 || roce.Ports[0].MTU != 4096 {
		t.Errorf("GID %d, MTU %d, want 10 and 4096", chosen, roce.Ports[0].MTU)
	}
	if soft.Ports[0].Chosen || len(soft.Ports[0].Problems) == 0 {
		t.Errorf("a port without a GID: %+v", soft.Ports[0])
	}
	if _, err := json.Marshal(f); err != nil {
		t.Error(err)
	}
}

func TestExamineNames(t *testing.T) {
	for devices, want := range map[string]string{"mlx5_7": "mlx5_10:1", "mlx5_0:2": "Disabled",
		"mlx5_10:1#3": "index 3"} {
		f, err := findings(t, devices)
		var u *driver.UnavailableError
		if !errors.As(err, &u) || !strings.Contains(u.Reason, want) || len(f.Problems) == 0 {
			t.Errorf("%s: %v, want %q", devices, err, want)
		}
	}
	if f, err := findings(t, "mlx5_10,nowhere"); err != nil || len(f.Problems) == 0 ||
		f.Devices[0].Ports[0].Chosen {
		t.Errorf("one of two: %+v, %v", f, err)
	}
	if _, err := findings(t, "a b"); !errors.Is(err, driver.ErrBounds) {
		t.Errorf("no list of devices: %v", err)
	}
	f, err := examine(Config{sysfs: &sysfs{root: filepath.Join(t.TempDir(), "none")}},
		func(*Config) error {
			return nil
		})
	if !errors.Is(err, driver.ErrUnavailable) || len(f.Problems) == 0 || f.Problems[0].Fix == "" {
		t.Errorf("a machine without devices: %+v, %v", f.Problems, err)
	}
	missing := unavailable("no library", "install it")
	if f, err := examine(Config{sysfs: newFixture(t)}, func(*Config) error {
		return missing
	}); err != missing || len(f.Devices) != 3 {
		t.Errorf("without the library: %d devices, %v", len(f.Devices), err)
	}
}

func TestPacketMTU(t *testing.T) {
	for frame, want := range map[int]int{0: 0, 200: 0, 1500: 1024, 4200: 4096, 4096: 2048,
		9000: 4096} {
		if got := packetMTU(frame); got != want {
			t.Errorf("frames of %d hold %d, want %d", frame, got, want)
		}
	}
}

// TestUnavailable is this machine as it is: either it has devices, or it says what mends that.
func TestUnavailable(t *testing.T) {
	b, err := New(Config{})
	var u *driver.UnavailableError
	switch {
	case err == nil:
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	case !errors.As(err, &u) || u.Backend != "rdma" || u.Reason == "" || u.Fix == "":
		t.Errorf("%#v", err)
	}
}

// TestMissingLibrary runs in a process of its own: this one may have loaded verbs.
func TestMissingLibrary(t *testing.T) {
	const variable, missing = "SLUICE_TEST_MISSING_VERBS", "/nonexistent/libibverbs.so.1"
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
		if !errors.As(err, &u) || u.Backend != "rdma" || u.Reason == "" || u.Fix == "" {
			t.Errorf("%v", err)
		}
	}
}

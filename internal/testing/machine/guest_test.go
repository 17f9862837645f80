// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// sysfsOf is a /sys/class/infiniband with ports in these states.
func sysfsOf(t *testing.T, states map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for device, state := range states {
		dir := filepath.Join(root, device, "ports", "1")
		require.NoError(t, os.MkdirAll(dir, 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "state"), []byte(state+"\n"), 0o644))
	}
	return root
}

func TestActive(t *testing.T) {
	root := sysfsOf(t, map[string]string{"mlx5_1": "4: ACTIVE", "mlx5_0": "4: ACTIVE",
		"mlx5_2": "1: DOWN", "mlx5_3": "5: ACTIVE_DEFER"})
	if got, err := active(root, 2); err != nil || !slices.Equal(got, []string{"mlx5_0", "mlx5_1"}) {
		t.Errorf("%v, %v", got, err)
	}
	if got, err := active(root, 1); err != nil || !slices.Equal(got, []string{"mlx5_0"}) {
		t.Errorf("%v, %v", got, err)
	}
	for _, root := range []string{root, filepath.Join(root, "nothing")} {
		_, err := active(root, 3)
		var missing *driver.UnavailableError
		if !errors.As(err, &missing) || missing.Fix != "make guest" {
			t.Errorf("%v is no reason to skip a test", err)
		}
	}
}

func TestFaultsAreForTheGuest(t *testing.T) {
	if _, err := NewWire(0); InGuest() != (err == nil) || err != nil &&
		!errors.Is(err, driver.ErrUnavailable) {
		t.Errorf("inside: %v, and %v", InGuest(), err)
	}
}

// TestRealWires tries what other tests rely on.
func TestRealWires(t *testing.T) {
	names, err := VerbsDevices(4)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	w, err := NewWire(1)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	if want := []string{"rxe0", "rxe1", "rxe2", "rxe3"}; !slices.Equal(names, want) {
		t.Fatalf("devices %v, want %v", names, want)
	}
	defer w.Mend()
	steps := []struct {
		name   string
		do     func() error
		active string // devices, after it
		found  string // in the way out of eth3
	}{
		{"loss", func() error { return w.Loss("100%") }, "rxe0 rxe1 rxe2 rxe3", "loss 100%"},
		{"delay", func() error { return w.Delay("20ms") }, "rxe0 rxe1 rxe2 rxe3", "delay 20ms"},
		{"down", w.Down, "rxe0 rxe1", "delay 20ms"},
		{"up", w.Up, "rxe0 rxe1 rxe2 rxe3", "delay 20ms"},
		{"mend", w.Mend, "rxe0 rxe1 rxe2 rxe3", "noqueue"},
	}
	for _, s := range steps {
		require.NoError(t, s.do())
		if got, _ := VerbsDevices(0); len(got) != 0 {
			t.Errorf("none of %v were asked for", got)
		}
		n := len(strings.Fields(s.active))
		got, err := VerbsDevices(n)
		if _, more := VerbsDevices(n + 1); err != nil || more == nil ||
			strings.Join(got, " ") != s.active {
			t.Errorf("after %s: active are %v, %v; want %s", s.name, got, err, s.active)
		}
		if got := queue(t, "eth3"); !strings.Contains(got, s.found) {
			t.Errorf("after %s: eth3 has %s, want %s", s.name, got, s.found)
		}
	}
}

// queue is what tc says about a device.
func queue(t *testing.T, device string) string {
	t.Helper()
	out, err := exec.Command("tc", "qdisc", "show", "dev", device).CombinedOutput()
	if err != nil {
		t.Fatalf("tc: %v: %s", err, out)
	}
	return string(out)
}

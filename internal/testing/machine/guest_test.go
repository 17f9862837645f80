// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver/drivertest"
)

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
	require.NoError(t, err, "tc: %s", out)
	return string(out)
}

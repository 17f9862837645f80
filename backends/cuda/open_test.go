// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/cuda"
	"github.com/sluicehq/sluice/driver"
)

func TestConfig(t *testing.T) {
	for name, c := range map[string]Config{
		"streams": {Streams: 33}, "negative": {Gated: -1}, "no power of two": {BatchesMax: 1000},
		"two budgets":     {Budget: cuda.Budget{SMs: 1, InFlight: 1}},
		"negative budget": {Budget: cuda.Budget{SMs: -1}},
		"message":         {MessageMax: -5}, "keys": {KeysMax: 1 << 30},
		"peers": {PeersMax: 1 << 20}, "grace": {RevokeGrace: -1}, "dial": {DialTimeout: -1},
	} {
		if _, err := New(c); !errors.Is(err, driver.ErrBounds) ||
			!strings.Contains(err.Error(), "Config.") {
			t.Errorf("%s: %v, want %v and the field", name, err, driver.ErrBounds)
		}
	}
}

// unavailable opens a backend, which must say that this machine cannot, and why.
func unavailable(t *testing.T, cfg Config, reason string) {
	t.Helper()
	b, err := New(cfg)
	if err == nil {
		_ = b.Close()
	}
	var u *driver.UnavailableError
	if !errors.As(err, &u) || !strings.Contains(u.Reason, reason) || u.Fix == "" {
		t.Errorf("%v, want a *driver.UnavailableError about %q with what to do", err, reason)
	}
}

func TestOpenRefuses(t *testing.T) {
	onStandIn(t)
	newRig(t, testConfig()) // looks for what the failures leave behind
	cfg := testConfig()
	cfg.Devices = []int{0, 7}
	unavailable(t, cfg, "no device 7")
	for _, list := range [][]int{{0, 0}, {}} {
		cfg.Devices = list
		_, err := New(cfg)
		sameError(t, "devices twice, or none", err, driver.ErrBounds)
	}
	cfg = testConfig()
	t.Run("old card", func(t *testing.T) {
		t.Setenv("STANDIN_COMPUTE", "70")
		unavailable(t, cfg, "compute capability 8.0")
	})
	t.Run("old card without a kernel", func(t *testing.T) {
		t.Setenv("STANDIN_COMPUTE", "70")
		b, err := New(Config{Library: cfg.Library})
		require.NoError(t, err)
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Run("no device", func(t *testing.T) {
		t.Setenv("STANDIN_DEVICES", "0")
		unavailable(t, cfg, "no device")
	})
	cfg.Library = "/nowhere/libcuda.so.1"
	unavailable(t, cfg, "/nowhere/libcuda.so.1")
}

// TestOldDriver has a driver that lacks a function that all streams need.
func TestOldDriver(t *testing.T) {
	if alone(t, "-DcuEventRecord=cuEventRecordOfAnother") {
		unavailable(t, Config{Library: libcuda.Path}, "has no function cuEventRecord")
	}
}

// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package gds

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/fakecufile"
)

// TestCompatModeRefuses: New refuses what cuFile does not do right by way of host memory, names
// cause and cure, and takes it with nvidia-fs.
func TestCompatModeRefuses(t *testing.T) {
	onStandIn(t)
	for _, c := range []struct {
		name        string
		cfg         Config
		reason, fix string
	}{
		{"streams", Config{Way: WayStream}, "cuFile's streams read wrong bytes in compat mode",
			"leave Config.Way alone"},
		{"host memory", Config{Host: true}, "cuFile fails writes of host memory in compat mode",
			"backend posix"},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.cfg.CUDA, c.cfg.Library = testConfig().CUDA, testConfig().Library
			b, err := New(c.cfg)
			if err == nil {
				_ = b.Close()
			}
			var missing *driver.UnavailableError
			require.ErrorAs(t, err, &missing)
			require.Equal(t, "gds", missing.Backend)
			require.Contains(t, missing.Reason, c.reason)
			require.Contains(t, missing.Reason, "nvidia-fs is not loaded")
			require.Contains(t, missing.Fix, c.fix)
			require.Contains(t, missing.Fix, "modprobe nvidia-fs")
			library.Set(t, fakecufile.Direct, 1)
			b, err = New(c.cfg)
			require.NoError(t, err)
			require.NoError(t, b.Close())
		})
	}
}

func TestFactsInWords(t *testing.T) {
	f := Facts{Version: "1.15", Mode: "so", BatchMax: 128, Batches: true, Streams: true,
		DirectMax: 16 << 20, PinnedMax: 32 << 30, CacheMax: 3 << 29}
	want := "cuFile 1.15: so; batches of 128: yes, streams: yes, requests to 16 MiB, " +
		"pins 32 GiB, buffers of 1.5 GiB"
	require.Equal(t, want, f.String())
	f.Compat = true
	require.Contains(t, f.String(), "streams: not in compat mode")
}

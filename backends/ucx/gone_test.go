// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// openBackend opens one over TCP and the loopback device. The test closes it.
func openBackend(t *testing.T, cfg Config) *Backend {
	t.Helper()
	cfg.Transports, cfg.Devices = "tcp", "lo"
	b, err := New(cfg)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	return b
}

// TestConnectStale connects to workers that are gone although their process lives.
func TestConnectStale(t *testing.T) {
	leak.Check(t)
	cfg := Config{Grace: 2 * time.Second}
	near, far := openBackend(t, cfg), openBackend(t, cfg)
	require.NoError(t, far.Close())
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		p, err := near.Connect(ctx, far.Addr())
		cancel()
		if !errors.Is(err, driver.ErrPeerLost) && !errors.Is(err, driver.ErrTimeout) {
			t.Errorf("connect to a backend that is gone: %v, %v", p, err)
		}
	}
	begin := time.Now()
	if err := near.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	t.Logf("closed after %v", time.Since(begin))
}

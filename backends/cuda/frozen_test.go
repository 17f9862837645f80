// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestTimedFrozenOwner: batches go on without the owner, and what it has to answer has a limit.
func TestTimedFrozenOwner(t *testing.T) {
	cfg := peersConfig()
	cfg.DialTimeout = limit
	r := newRig(t, cfg)
	o := startOwner(t)
	p, err := r.b.Connect(t.Context(), o.addr)
	require.NoError(t, err)
	r.p = p.(*peer)
	key, _, err := p.Import(o.token)
	require.NoError(t, err)
	l := r.local(drivertest.HostMemory, 4096)
	require.NoError(t, testkit.Freeze(o.Process))
	r.move(driver.Write, l, &place{key: key}, driver.Desc{Len: 4096})
	r.b.cfg.DialTimeout = 300 * time.Millisecond // nobody dials us
	_, _, err = p.Import(o.token)
	sameError(t, "import from a frozen process", err, driver.ErrTimeout)
	_, err = r.b.Connect(t.Context(), o.addr)
	sameError(t, "connect to a frozen process", err, driver.ErrTimeout)
	select {
	case <-p.Lost():
		t.Error("a frozen process counts as lost")
	default:
	}
}

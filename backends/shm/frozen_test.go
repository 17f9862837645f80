// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// Neither kind of memory needs the hand of an owner that is frozen.
func TestTimedFrozenOwnerTakesWrites(t *testing.T) {
	for _, kind := range []string{"foreign", "shared"} {
		o := startOwner(t, kind, 0)
		b := open(t, Config{})
		m, mem := share(t, b, drivertest.HostMemory, ownerBytes)
		p := dial(t, b, o.addr)
		key, size, err := p.Import(o.token)
		require.NoError(t, err)
		o.freeze(t)
		fill(mem, 0xEE)
		d := []driver.Desc{{Len: size, LocalKey: m.Key(), RemoteKey: key}}
		require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write, Descs: d}))
		require.NoError(t, await(t, b, 1), "%s: write to a frozen owner", kind)
		fill(mem, 0)
		require.NoError(t, p.Submit(2, &driver.Batch{Op: driver.Read, Descs: d}))
		if err := await(t, b, 2); err != nil {
			t.Errorf("%s: read of a frozen owner: %v", kind, err)
		} else if bytes.Count(mem, []byte{0xEE}) != len(mem) {
			testkit.ErrorBroken(t,
				"%s: read of a frozen owner: other bytes than were written", kind)
		}
		o.thaw(t)
	}
}

func TestTimedFrozenOwnerDoesNotHoldUpImport(t *testing.T) {
	o := startOwner(t, "shared", 0)
	b := open(t, Config{DialTimeout: time.Second})
	p := dial(t, b, o.addr)
	o.freeze(t)
	_, _, err := p.Import(o.token)
	wantError(t, "import from a frozen owner", err, driver.ErrTimeout)
	o.thaw(t)
	take(t, p, o.token)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	o.freeze(t)
	_, err = b.Connect(ctx, o.addr)
	wantError(t, "connect to a frozen owner", err, context.DeadlineExceeded)
}

// A write that needs the owner's fresh pages ends when a frozen owner does not give them,
// and later writes find them once it goes on.
func TestTimedFrozenOwnerDoesNotHoldUpAWriteIntoFreshPages(t *testing.T) {
	o := startOwner(t, "shared", 0)
	b := open(t, Config{DialTimeout: 200 * time.Millisecond})
	m, _ := share(t, b, drivertest.HostMemory, ownerBytes)
	p := dial(t, b, o.addr)
	key, _ := take(t, p, o.token)
	o.renew(t)
	o.freeze(t)
	batch := &driver.Batch{Op: driver.Write,
		Descs: []driver.Desc{{Len: 4096, LocalKey: m.Key(), RemoteKey: key}}}
	require.NoError(t, p.Submit(1, batch))
	require.ErrorIs(t, await(t, b, 1), driver.ErrTimeout)
	o.thaw(t)
	soon(t, "writes find the fresh pages", func() bool {
		require.NoError(t, p.Submit(2, batch))
		return await(t, b, 2) == nil
	})
}

// A Connect whose time Config.DialTimeout limits says so, as one that its caller limits.
func TestTimedConnectEndsByDialTimeout(t *testing.T) {
	o := startOwner(t, "shared", 0)
	o.freeze(t)
	_, err := open(t, Config{DialTimeout: 50 * time.Millisecond}).Connect(t.Context(), o.addr)
	require.ErrorIs(t, err, driver.ErrTimeout)
}

// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/fakeverbs"
)

// TestNearRailsGoFirst checks that a rail which does not suit memory moves nothing of it while one
// that does is live.
func TestNearRailsGoFirst(t *testing.T) {
	const n = 4 << 20
	l := openLink(t, fakeDevices(t, 2), testShape{pairs: 2, bytes: n, prefer: 1 << 1})
	moved := func(rail int) uint64 {
		c, err := l.near.Counters(rail)
		require.NoError(t, err)
		return c.BytesOut + c.BytesIn
	}
	for _, op := range []driver.Op{driver.Write, driver.Read} {
		require.NoError(t, l.move(t, op, driver.Desc{Len: n}))
	}
	if far, near := moved(0), moved(1); far != 0 || near != 2*n {
		t.Errorf("%d bytes over the rail that is far, %d over that which is near, want all there",
			far, near)
	}
	require.NoError(t, l.conn.PairEnd(1))
	if err := l.move(t, driver.Write, driver.Desc{Len: n}); err != nil || moved(0) != n {
		t.Errorf("without the near rail: %v, %d bytes over the other", err, moved(0))
	}
}

// TestFlightBoundsPairs checks what a cancel may have to wait for.
func TestFlightBoundsPairs(t *testing.T) {
	const n, flight = 4 << 20, 256 << 10
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{bytes: n, timeout: 20, config: Config{SliceMax: 64 << 10,
		FlightMax: flight, Depth: 32}})
	near := d.fake.Device(0)
	near.Set(fakeverbs.Frozen, 1)
	tag := l.submit(t, driver.Write, nil, driver.Desc{Len: n})
	if c := l.counters(t); c.InFlight != flight {
		t.Errorf("%d bytes under way on a queue pair, want %d", c.InFlight, flight)
	}
	near.Set(fakeverbs.Frozen, 0)
	if err := l.outcome(t, tag); err != nil {
		t.Error(err)
	}
}

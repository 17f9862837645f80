// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/guest"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// realVerbs opens a context on the devices of the machine, or of the guest.
func realVerbs(t testing.TB, n int) ([]string, *Context) {
	t.Helper()
	devices, err := guest.Devices(n)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
		t.Fatal(err)
	}
	require.NoError(t, Load(""))
	leak.Check(t)
	c, err := Open(testConfig(t))
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return devices, c
}

func TestRealRails(t *testing.T) {
	devices, c := realVerbs(t, 2)
	if n, err := Devices(); n < 2 || err != nil {
		t.Errorf("%d devices, %v", n, err)
	}
	for i, name := range devices {
		rail, err := c.OpenRail(RailConfig{Device: name, Port: 1, GID: 1, Timeout: 10, Retries: 1})
		if err != nil || rail != i {
			t.Fatalf("rail %d of %s: %v", rail, name, err)
		}
		r, err := c.Rail(rail)
		if err != nil || r.State != 4 || r.DepthMax < 16 || r.SGEMax < 1 || r.MTU < 1 ||
			r.GID == [16]byte{} {
			t.Errorf("%s: %+v, %v", name, r, err)
		}
		t.Logf("%s: %+v", name, r)
	}
}

func TestRealMemory(t *testing.T) {
	devices, c := realVerbs(t, 1)
	if _, err := c.OpenRail(RailConfig{Device: devices[0], Port: 1, GID: 1, Timeout: 10,
		Retries: 1}); err != nil {
		t.Fatal(err)
	}
	mem := pages(t, 4<<20)
	for _, flags := range []uint32{0, Relaxed, ReadOnly} {
		p := pin(t, c, 0, mem, flags)
		require.NoError(t, c.Map(1, mem, []*Pin{p}, 1))
		first, err := c.Grant(1, 0, 1<<60, flags)
		if err != nil || first == 0 {
			t.Fatalf("flags %d: key %#x, %v", flags, first, err)
		}
		require.NoError(t, c.Revoke(1))
		if second, err := c.Grant(1, 0, 1<<61, flags); err != nil || second == 0 {
			t.Errorf("flags %d: key %#x, then %#x, %v", flags, first, second, err)
		}
		c.Unmap(1)
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
}

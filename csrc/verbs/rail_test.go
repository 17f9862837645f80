// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"errors"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/testing/standin"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// testConfig is small.
func testConfig(t testing.TB) Config {
	t.Helper()
	events := make([]*proc.Event, 2)
	for i := range events {
		e, err := proc.NewEvent()
		require.NoError(t, err)
		t.Cleanup(func() { e.Close() })
		events[i] = e
	}
	return Config{BatchesMax: 64, NotifyMax: 8, ConnsMax: 4, Depth: 32, SliceMax: 1 << 20,
		FlightMax: 8 << 20,
		SpinNanos: 20000, WakeFD: events[0].FD(), ControlFD: events[1].FD()}
}

// fixture opens a context in the stand-in with n devices, and sees to it that all of it is given
// back in the end.
func fixture(t testing.TB, n int) (*standin.VerbsFabric, *Context) {
	t.Helper()
	f := standin.OpenVerbs(t, n, Load)
	testkit.CheckLeaks(t, f.InUse)
	c, err := Open(testConfig(t))
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return f, c
}

func railConfig(d standin.VerbsDevice) RailConfig {
	return RailConfig{Device: d.Name(), Port: 1, GID: 1, Timeout: 10, Retries: 1}
}

// openRails opens a rail for each device.
func openRails(t testing.TB, c *Context, f *standin.VerbsFabric, n int) {
	t.Helper()
	for i := range n {
		rail, err := c.OpenRail(railConfig(f.Device(i)))
		if err != nil || rail != i {
			t.Fatalf("rail %d of device %d: %v", rail, i, err)
		}
	}
}

func TestRailSaysWhatItCanDo(t *testing.T) {
	f, c := fixture(t, 2)
	d := f.Device(1)
	d.Set("max_sge", 13)
	d.Set("max_inline", 100)
	cfg := railConfig(d)
	cfg.MTU = 2
	rail, err := c.OpenRail(cfg)
	require.NoError(t, err)
	r, err := c.Rail(rail)
	require.NoError(t, err)
	if r.SGEMax != 13 || r.InlineMax != 64 || r.DepthMax != 32 || r.MTU != 2 ||
		!r.DMABuf {
		t.Errorf("%+v", r)
	}
	if gid := netip.AddrFrom16(r.GID); gid.Unmap() != netip.MustParseAddr("10.99.0.2") {
		t.Errorf("GID %v", gid)
	}
	if n, err := c.Counters(rail); err != nil || n != (Counters{}) {
		t.Errorf("counted %+v, %v", n, err)
	}
}

// What a device has at most it may not have at once, or not for this program.
func TestRailTakesWhatThereIs(t *testing.T) {
	f, c := fixture(t, 1)
	d := f.Device(0)
	d.Set("max_wr", 20)
	d.Set("max_srq_wr", 5)
	d.Set("max_cqe", 40)
	openRails(t, c, f, 1)
	if r, err := c.Rail(0); err != nil || r.DepthMax != 4 {
		t.Errorf("depth %d of a device with 20 requests, %v", r.DepthMax, err)
	}
	if n := d.Get("qps"); n != 0 {
		t.Errorf("%d queue pairs are left of the trial", n)
	}
	cfg := railConfig(d)
	for i := 1; i < RailsMax; i++ {
		cfg.EntriesMax = []int{1, 7, 1000}[i%3]
		rail, err := c.OpenRail(cfg)
		require.NoError(t, err)
		r, err := c.Rail(rail)
		require.NoError(t, err)
		require.Equal(t, min(cfg.EntriesMax, 30), r.SGEMax, "no more entries than asked")
	}
	_, err := c.OpenRail(cfg)
	require.ErrorContains(t, err, "16 rails already")
}

// Receives are made when connections need them, and not before.
func TestReceivesGrowWithConnections(t *testing.T) {
	f := standin.OpenVerbs(t, 1, Load)
	testkit.CheckLeaks(t, f.InUse)
	cfg := testConfig(t)
	cfg.NotifyMax, cfg.ConnsMax = 200, 100
	c, err := Open(cfg)
	require.NoError(t, err)
	defer c.Close()
	openRails(t, c, f, 1)
	d := f.Device(0)
	before := d.Get("kib_locked")
	if before > 300 {
		t.Errorf("%d KiB are locked by a rail without connections", before)
	}
	d.Set("locked_kib", before+300)
	conn, err := c.Connect(false, 0)
	require.NoError(t, err)
	defer conn.Close()
	if _, err := conn.PairMake(0, 0); !errors.Is(err, syscall.ENOMEM) {
		t.Errorf("a queue pair whose receives have no room: %v", err)
	}
	d.Set("locked_kib", 0)
	d.Set("receives_full", 1)
	_, err = conn.PairMake(0, 0)
	require.ErrorIs(t, err, syscall.ENOMEM, "the device has no room for a receive")
	if _, err := conn.PairMake(0, 0); err != nil {
		t.Errorf("once there is room: %v", err)
	}
	if n := d.Get("kib_locked"); n < 201*4 || n > 1500 {
		t.Errorf("%d KiB are locked for a connection of 200 messages", n)
	}
	require.EqualValues(t, 256, d.Get("receives"), "blocks of 64 for 201 messages and 16 more")
}

func TestRailRefusals(t *testing.T) {
	f, c := fixture(t, 2)
	good := railConfig(f.Device(0))
	for _, x := range []struct {
		name, reason string
		change       func(*RailConfig)
		word         string
		value        uint32
	}{
		{"no such device", "there is no device nope", func(r *RailConfig) {
			r.Device = "nope"
		}, "link", 1},
		{"no name", "there is no device", func(r *RailConfig) { r.Device = "" }, "link", 1},
		{"no such port", "no port 2: it has 1", func(r *RailConfig) { r.Port = 2 }, "link", 1},
		{"port 0", "no port 0", func(r *RailConfig) { r.Port = 0 }, "link", 1},
		{"no such GID", "no GID at index 9", func(r *RailConfig) { r.GID = 9 }, "link", 1},
		{"device gone", "open the device: ", nil, "fatal", 1},
		{"locked memory", "ulimit -l", nil, "locked_kib", 1},
		{"no queue pairs", "make a queue pair", nil, "max_wr", 1},
	} {
		cfg := good
		if x.change != nil {
			x.change(&cfg)
		}
		f.Device(0).Set(x.word, x.value)
		_, err := c.OpenRail(cfg)
		f.Device(0).Set(x.word, 0)
		f.Device(0).SetLink(true)
		var u *driver.UnavailableError
		if !errors.As(err, &u) || !strings.Contains(u.Reason, x.reason) {
			t.Errorf("%s: %v, want an UnavailableError with %q", x.name, err, x.reason)
		}
		if n := f.InUse(); len(n) != 0 {
			t.Fatalf("%s: %v is left", x.name, n)
		}
	}
	openRails(t, c, f, 1) // and then it works
	if _, err := c.Rail(1); !errors.Is(err, driver.ErrClosed) {
		t.Errorf("a rail that was not opened: %v", err)
	}
}

func TestNothingAfterClose(t *testing.T) {
	f, c := fixture(t, 1)
	openRails(t, c, f, 1)
	for range 2 {
		require.NoError(t, c.Close())
	}
	if n := f.InUse(); len(n) != 0 {
		t.Errorf("closed, and %v is in use", n)
	}
	if _, err := c.OpenRail(railConfig(f.Device(0))); err == nil {
		t.Error("a rail was opened in a closed context")
	}
	if _, err := c.Rail(0); !errors.Is(err, driver.ErrClosed) {
		t.Errorf("a rail of a closed context: %v", err)
	}
	if _, err := c.Pin(0, rangeOf(make([]byte, 1)), 0); !errors.Is(err, driver.ErrClosed) {
		t.Errorf("a pin in a closed context: %v", err)
	}
	if err := c.Revoke(1); err == nil {
		t.Error("revoked a key that is not known")
	}
	c.Unmap(1)
}

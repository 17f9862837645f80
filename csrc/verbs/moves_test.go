// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// baseOf is the address that the peer's requests name.
func baseOf(mem []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))) }

func rangeOf(mem []byte) Range { return Range{Addr: baseOf(mem), Len: uint64(len(mem)), FD: -1} }

func mapRange(c *Context, key uint32, mem []byte, pins []Pin, prefer uint32) error {
	return c.Map(key, baseOf(mem), uint64(len(mem)), pins, prefer)
}

// TestGathersEntries counts requests: as many entries go into one as the device takes.
func TestGathersEntries(t *testing.T) {
	l := openLink(t, fakeDevices(t, 1), testShape{})
	rail, err := l.near.Rail(0)
	require.NoError(t, err)
	p := l.pattern(2048, 656, 1312, 656)
	want := uint64((p.Count + rail.SGEMax - 1) / rail.SGEMax)
	if rail.SGEMax < 5 {
		t.Fatalf("the device takes %d entries", rail.SGEMax)
	}
	fill(l.local, 1)
	for _, op := range []driver.Op{driver.Write, driver.Read} {
		before := l.counters(t)
		l.tag++
		require.NoError(t, l.conn.Submit(l.tag, &driver.Batch{Op: op, Pattern: p}))
		require.NoError(t, l.outcome(t, l.tag))
		after := l.counters(t)
		if n := after.Requests - before.Requests; n != want {
			t.Errorf("%v: %d requests, want %d of %d entries", op, n, want, rail.SGEMax)
		}
		if n := after.BytesOut + after.BytesIn - before.BytesOut - before.BytesIn; n != p.Bytes() {
			t.Errorf("%v: %d bytes counted, want %d", op, n, p.Bytes())
		}
	}
}

func (l *testLink) counters(t testing.TB) Counters {
	t.Helper()
	c, err := l.near.Counters(0)
	require.NoError(t, err)
	return c
}

// TestRefusesWrong is of what the suite has no way to ask for.
func TestRefusesWrong(t *testing.T) {
	l := openLink(t, fakeDevices(t, 1), testShape{})
	good := driver.Desc{Len: 1, LocalKey: testKey, RemoteKey: l.slot}
	require.ErrorIs(t, l.back.Submit(1, batchOf(driver.Write, []driver.Desc{good}, nil)),
		driver.ErrClosed, "the owner submits")
	for name, b := range map[string]*driver.Batch{
		"a message too long":      batchOf(driver.Write, nil, make([]byte, NotifMax+1)),
		"a message behind a read": batchOf(driver.Read, nil, []byte{1}),
		"no bytes": batchOf(driver.Write, []driver.Desc{{LocalKey: testKey,
			RemoteKey: l.slot}}, nil),
	} {
		require.ErrorIs(t, l.conn.Submit(1, b), driver.ErrBounds, name)
	}
	slot, err := l.conn.Import(Import{Base: baseOf(l.remote), Size: testBytes,
		RemoteKeys: []uint32{0, 1}})
	require.NoError(t, err)
	bad := good
	bad.RemoteKey = slot
	err = l.conn.Submit(1, batchOf(driver.Read, []driver.Desc{good, bad}, nil))
	var piece *driver.PieceError
	require.ErrorIs(t, err, driver.ErrNoRoute, "over a queue pair that is not there")
	require.ErrorAs(t, err, &piece)
	require.Equal(t, 1, piece.Piece)
}

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
	near.Set("frozen", 1)
	tag := l.submit(t, driver.Write, nil, driver.Desc{Len: n})
	if c := l.counters(t); c.InFlight != flight {
		t.Errorf("%d bytes under way on a queue pair, want %d", c.InFlight, flight)
	}
	near.Set("frozen", 0)
	if err := l.outcome(t, tag); err != nil {
		t.Error(err)
	}
}

// TestSmallBatchesTakeTurns has two rails that are idle.
func TestSmallBatchesTakeTurns(t *testing.T) {
	l := openLink(t, fakeDevices(t, 2), testShape{pairs: 2})
	for i := range 20 {
		require.NoError(t, l.move(t, driver.Write, driver.Desc{Remote: uint64(i) * 100, Len: 100}))
	}
	for rail := range 2 {
		c, err := l.near.Counters(rail)
		require.NoError(t, err)
		require.EqualValues(t, 1000, c.BytesOut)
	}
}

// TestVerbsIdle checks that the threads sleep while there is nothing to do: for as long as nobody
// wakes them, and not in turns.
func TestVerbsIdle(t *testing.T) {
	l := openLink(t, fakeDevices(t, 2), testShape{pairs: 2})
	require.NoError(t, l.move(t, driver.Write, driver.Desc{Len: 1000}))
	best := ^uint64(0)
	for range 5 { // the last completion may still be in a queue
		before := switches(t)
		time.Sleep(100 * time.Millisecond)
		best = min(best, switches(t)-before)
	}
	if best != 0 {
		t.Errorf("idle threads wake %d times in 100 ms", best)
	}
}

// switches counts how often the threads of contexts went to sleep.
func switches(t *testing.T) uint64 {
	t.Helper()
	files, err := filepath.Glob("/proc/self/task/*/status")
	require.NoError(t, err)
	var sum uint64
	threads := 0
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil || !strings.HasPrefix(string(text), "Name:\tsluice-verbs\n") {
			continue
		}
		threads++
		_, rest, _ := strings.Cut(string(text), "\nvoluntary_ctxt_switches:\t")
		line, _, _ := strings.Cut(rest, "\n")
		n, err := strconv.ParseUint(line, 10, 64)
		require.NoError(t, err)
		sum += n
	}
	if threads != 2 {
		t.Fatalf("%d threads, want those of two contexts", threads)
	}
	return sum
}

// TestNestMerges counts requests: runs that lie together at the peer go in one, whatever
// lies between them here.
func TestNestMerges(t *testing.T) {
	l := openLink(t, fakeDevices(t, 1), testShape{spin: true})
	rail, err := l.near.Rail(0)
	require.NoError(t, err)
	p := l.pattern(8, 64, 64<<10, 64*4*8)
	p.Loops = []driver.Loop{{N: 4, Local: 8192, Remote: 64 * 8}, {N: 8, Local: 256, Remote: 64}}
	before := l.counters(t)
	l.tag++
	require.NoError(t, l.conn.Submit(l.tag, &driver.Batch{Op: driver.Write, Pattern: p}))
	require.NoError(t, l.outcome(t, l.tag))
	most := uint64((p.Count*p.Runs() + rail.SGEMax - 1) / rail.SGEMax)
	require.LessOrEqual(t, l.counters(t).Requests-before.Requests, most)
}

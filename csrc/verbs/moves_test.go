// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// baseOf is the address that the peer's requests name.
func baseOf(mem []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))) }

// tests run over the stand-in and over real devices alike.
var tests = []struct {
	name  string
	pairs int
	run   func(t *testing.T, d hosts)
	core  bool // it depends on the driver, and an emulated machine runs it in seconds
}{
	{"moves bytes", 1, moveBytes, true},
	{"moves scattered bytes", 1, moveScattered, false},
	{"moves pages", 1, movePages, false},
	{"gathers entries into few requests", 1, gatherEntries, false},
	{"refuses what is wrong", 1, refuseWrong, true},
	{"many batches in few places", 1, manyBatches, false},
	{"messages follow their data", 1, followData, true},
	{"credit bounds messages", 1, creditBounds, false},
	{"messages outlive their connection", 1, notifsOutlive, false},
	{"sleepers are woken", 1, wakeSleepers, false},
	{"batches are cancelled", 1, cancelBatches, true},
	{"grants are revoked", 1, revokeGrants, true},
	{"connections end", 1, endConnections, true},
	{"connections drain", 1, drainConnections, false},
	{"a queue pair is made anew", 1, remakePairs, true},
	{"two queue pairs are made anew", 2, remakePairs, false},
	{"batches wait for queue pairs", 1, waitForPairs, false},
	{"many goroutines", 1, hammerLink, false},
	{"many goroutines over two queue pairs", 2, hammerLink, false},
}

func TestVerbs(t *testing.T) {
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) { test.run(t, fakeDevices(t, test.pairs)) })
	}
}

func TestRealVerbs(t *testing.T) {
	for _, test := range tests {
		if test.core {
			t.Run(test.name, func(t *testing.T) { test.run(t, realDevices(t, test.pairs)) })
		}
	}
}

func TestSoakRealVerbs(t *testing.T) {
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) { test.run(t, realDevices(t, test.pairs)) })
	}
}

// TestSoakHammer is what TestVerbs does with many goroutines, for longer.
func TestSoakHammer(t *testing.T) {
	for pairs := range 3 {
		hammerFor(t, fakeDevices(t, 1+pairs), 2000)
	}
}

func moveBytes(t *testing.T, d hosts) {
	l := openLink(t, d, testShape{})
	fill(l.local, 1)
	for _, n := range []uint64{1, 8, 656, 4095, 70000, 256 << 10, 1<<20 + 1, testBytes - 3} {
		if err := l.move(t, driver.Write, driver.Desc{Local: 1, Remote: 3, Len: n}); err != nil {
			t.Fatalf("write %d: %v", n, err)
		}
		if !bytes.Equal(l.remote[3:3+n], l.local[1:1+n]) {
			t.Fatalf("write %d: other bytes", n)
		}
		clear(l.local)
		if err := l.move(t, driver.Read, driver.Desc{Local: 2, Remote: 3, Len: n}); err != nil {
			t.Fatalf("read %d: %v", n, err)
		}
		if !bytes.Equal(l.remote[3:3+n], l.local[2:2+n]) {
			t.Fatalf("read %d: other bytes", n)
		}
		fill(l.local[:min(n+8, testBytes)], n)
	}
}

func moveScattered(t *testing.T, d hosts) {
	l := openLink(t, d, testShape{})
	fill(l.local, 1)
	r := rand.New(rand.NewPCG(2, 2))
	for _, entry := range []uint64{1, 656, 40000} {
		count := int(min(512, testBytes/entry/2))
		from, to := r.Perm(count), r.Perm(count)
		var descs []driver.Desc
		for i := range count {
			descs = append(descs, driver.Desc{Local: uint64(from[i]) * entry,
				Remote: uint64(to[i]) * entry * 2, Len: entry})
		}
		for _, op := range []driver.Op{driver.Write, driver.Read} {
			require.NoError(t, l.move(t, op, descs...))
			for _, d := range descs {
				if !bytes.Equal(l.local[d.Local:d.Local+entry], l.remote[d.Remote:d.Remote+entry]) {
					t.Fatalf("%v of entries of %d: other bytes at %+v", op, entry, d)
				}
			}
			clear(l.local)
		}
		fill(l.local, entry)
	}
}

func movePages(t *testing.T, d hosts) {
	l := openLink(t, d, testShape{})
	fill(l.local, 1)
	r := rand.New(rand.NewPCG(3, 3))
	p := l.pattern(512, 656, 700, 656)
	p.Local.Base, p.Remote.Base = 5, 100
	for _, i := range r.Perm(1024)[:512] {
		p.Local.List = append(p.Local.List, uint32(i))
	}
	for _, op := range []driver.Op{driver.Write, driver.Read} {
		l.tag++
		require.NoError(t, l.conn.Submit(l.tag, &driver.Batch{Op: op, Pattern: p}))
		require.NoError(t, l.outcome(t, l.tag))
		for i := range p.Count {
			at, to := p.Local.At(i), p.Remote.At(i)
			if !bytes.Equal(l.local[at:at+656], l.remote[to:to+656]) {
				t.Fatalf("%v: other bytes in entry %d", op, i)
			}
		}
		clear(l.local)
	}
}

// gatherEntries counts: as many entries go into a request as the device takes.
func gatherEntries(t *testing.T, d hosts) {
	l := openLink(t, d, testShape{})
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

func refuseWrong(t *testing.T, d hosts) {
	l := openLink(t, d, testShape{})
	good := driver.Desc{Len: 1, LocalKey: testKey, RemoteKey: l.slot}
	wrong := []struct {
		d    driver.Desc
		want error
	}{
		{driver.Desc{Len: 1, LocalKey: testKey + 1, RemoteKey: l.slot}, driver.ErrBounds},
		{driver.Desc{Len: 1, LocalKey: testKey, RemoteKey: l.slot + 1}, driver.ErrBounds},
		{driver.Desc{Len: testBytes + 1, LocalKey: testKey, RemoteKey: l.slot}, driver.ErrBounds},
		{driver.Desc{Local: 1, Len: testBytes, LocalKey: testKey, RemoteKey: l.slot},
			driver.ErrBounds},
		{driver.Desc{Remote: ^uint64(0), Len: 2, LocalKey: testKey, RemoteKey: l.slot},
			driver.ErrBounds},
		{driver.Desc{LocalKey: testKey, RemoteKey: l.slot}, driver.ErrBounds},
	}
	for _, w := range wrong {
		err := l.conn.Submit(1, batchOf(driver.Write, []driver.Desc{good, w.d}, nil))
		var piece *driver.PieceError
		if !errors.Is(err, w.want) || !errors.As(err, &piece) || piece.Piece != 1 {
			t.Errorf("%+v: %v, want piece 1: %v", w.d, err, w.want)
		}
	}
	if err := l.back.Submit(1, batchOf(driver.Write, []driver.Desc{good}, nil)); !errors.Is(err,
		driver.ErrClosed) {
		t.Errorf("the owner submits: %v", err)
	}
	im := Import{Base: baseOf(l.remote), Size: testBytes, ReadOnly: true, RemoteKeys: []uint32{1}}
	slot, err := l.conn.Import(im)
	require.NoError(t, err)
	good.RemoteKey = slot
	if err := l.conn.Submit(1, batchOf(driver.Write, []driver.Desc{good}, nil)); !errors.Is(err,
		driver.ErrReadOnly) {
		t.Errorf("write of what is read-only: %v", err)
	}
	l.conn.Expire(slot)
	if err := l.conn.Submit(1, batchOf(driver.Read, []driver.Desc{good}, nil)); !errors.Is(err,
		driver.ErrRevoked) {
		t.Errorf("read with a past epoch: %v", err)
	}
	l.conn.Drop(slot)
	if err := l.conn.Submit(1, batchOf(driver.Read, []driver.Desc{good}, nil)); !errors.Is(err,
		driver.ErrBounds) {
		t.Errorf("read of what was dropped: %v", err)
	}
	im.ReadOnly, im.RemoteKeys = false, []uint32{0, 1}
	slot, err = l.conn.Import(im)
	require.NoError(t, err)
	good.RemoteKey = slot
	if err := l.conn.Submit(1, batchOf(driver.Read, []driver.Desc{good}, nil)); !errors.Is(err,
		driver.ErrNoRoute) {
		t.Errorf("read over a queue pair that is not there: %v", err)
	}
}

// manyBatches has far more to do than places in the queue, and than bytes may be under way.
func manyBatches(t *testing.T, d hosts) {
	l := openLink(t, d, testShape{config: Config{Depth: 4, FlightMax: 20000, SliceMax: 4096}})
	fill(l.local, 1)
	const count, n = 300, 9000
	under := map[uint64]bool{}
	for i := 0; i < count || len(under) > 0; {
		at := uint64(i%200) * n
		if i < count {
			tag := uint64(1000 + i)
			err := l.conn.Submit(tag,
				batchOf(driver.Write, l.descs(driver.Desc{Local: at, Remote: at, Len: n}), nil))
			if err == nil {
				under[tag] = true
				i++
				continue
			}
			if !errors.Is(err, driver.ErrFull) {
				t.Fatal(err)
			}
		}
		d := l.take(t)
		if !under[d.Tag] || d.Status != 0 {
			t.Fatalf("completion %+v", d)
		}
		delete(under, d.Tag)
	}
	if !bytes.Equal(l.local[:200*n], l.remote[:200*n]) {
		t.Fatal("other bytes")
	}
	if c := l.counters(t); c.InFlight != 0 {
		t.Errorf("%d bytes under way in the end", c.InFlight)
	}
}

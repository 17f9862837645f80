// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"bytes"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/promise"
)

// Writers of many epochs: once a fence is over, no byte of an earlier one lands.
func TestFenceDuringWrites(t *testing.T) {
	everyWay(t, func(t *testing.T, l *lane) {
		var stop atomic.Bool
		var slot atomic.Uint32
		slot.Store(l.slot)
		zeros := make([]byte, testBytes)
		var wg sync.WaitGroup
		defer wg.Wait()
		defer stop.Store(true)
		fill(l.local, 1)
		for g := range uint64(3) {
			wg.Go(func() {
				for tag := g; !stop.Load(); tag += 3 {
					d := []driver.Desc{l.desc(g<<20, g<<20, 300000), l.desc(g<<20, g<<20+400000,
						300000)}
					d[0].RemoteKey, d[1].RemoteKey = slot.Load(), slot.Load()
					_ = submit(l.conn, driver.Write, tag, d, nil) // full, or dropped: again
					l.conn.Help(tag, nil)
				}
			})
		}
		wg.Go(func() {
			var done [8]ring.Done
			for !stop.Load() {
				l.near.Poll(done[:])
			}
		})
		for epoch := uint64(2); epoch < 12; epoch++ {
			time.Sleep(2 * time.Millisecond)
			require.NoError(t, l.far.Fence(testKey, epoch, testLimit))
			clear(l.remote)
			time.Sleep(3 * time.Millisecond)
			if !bytes.Equal(zeros, l.remote) {
				promise.Broken(t, "epoch %d: bytes landed after the fence", epoch)
			}
			l.conn.Drop(slot.Load())
			x, _ := l.far.Export(testKey)
			s, err := l.conn.Import(Import{Key: testKey, Size: testBytes, Ticket: epoch,
				Export: x})
			require.NoError(t, err)
			slot.Store(s)
		}
	})
}

func TestFencesOfSeveralAtOnce(t *testing.T) {
	everyWay(t, func(t *testing.T, l *lane) {
		var wg sync.WaitGroup
		for g := range uint64(4) {
			wg.Go(func() {
				for i := range uint64(30) {
					if err := l.far.Fence(testKey, 10+i*4+g, testLimit); err != nil {
						t.Error(err)
					}
					_, _ = l.far.Export(testKey)
				}
			})
		}
		wg.Wait()
		if err := l.far.Fence(1000, 2, testLimit); !errors.Is(err, driver.ErrBounds) {
			t.Errorf("an unknown key: %v", err)
		}
	})
}

func TestRefreshReachesTheNeighbour(t *testing.T) {
	l := openLane(t, ways[0])
	a, err := l.far.Allocate(64 << 10)
	require.NoError(t, err)
	t.Cleanup(func() { _ = a.Close() })
	mem := a.Bytes()
	parts := map[uint32][]byte{20: mem[:10000], 21: mem[10000:30000], 22: mem[40000:]}
	slots := map[uint32]uint32{}
	for key, part := range parts {
		require.NoError(t, l.far.Map(key, Memory{Mem: part, Ticket: 5, In: a}))
		x, ok := l.far.Export(key)
		slot, err := l.conn.Import(Import{Key: key, Size: uint64(len(part)), Ticket: 5,
			Export: x})
		if err != nil || !ok || !l.conn.Direct(slot) {
			t.Fatalf("key %d: %v", key, err)
		}
		slots[key] = slot
	}
	fill(mem, 9)
	before := bytes.Clone(mem)
	for range 2 {
		require.NoError(t, l.far.Refresh(20))
	}
	if !bytes.Equal(mem, before) {
		t.Fatal("fresh pages have other bytes")
	}
	for key, want := range map[uint32]bool{20: false, 21: false, 22: true} {
		if _, ok := l.far.Export(key); ok != want {
			t.Errorf("export of key %d after the refresh: %v", key, ok)
		}
	}
	for key, part := range parts {
		fill(l.local[:len(part)], uint64(key))
		l.tag++
		d := []driver.Desc{{Len: uint64(len(part)), LocalKey: testKey, RemoteKey: slots[key]}}
		if err := errors.Join(submit(l.conn, driver.Write, l.tag, d, nil),
			l.outcome(t, l.tag)); err != nil {
			t.Fatalf("key %d: %v", key, err)
		}
		if !bytes.Equal(part, l.local[:len(part)]) {
			t.Fatalf("key %d: a write after the refresh does not arrive", key)
		}
	}
	if err := l.far.Fence(20, 6, testLimit); err != nil {
		t.Error(err)
	}
	for key := range parts {
		l.far.Unmap(key)
	}
}

func TestManyMemories(t *testing.T) {
	everyWay(t, func(t *testing.T, l *lane) {
		const n = 10000
		for key := uint32(100); key < 100+n; key++ {
			require.NoError(t, l.far.Map(key, Memory{Mem: l.remote[key*8:][:8],
				Ticket: uint64(key)}))
		}
		if err := l.far.Map(100, Memory{Mem: l.remote[:8], Ticket: 1}); err == nil {
			t.Error("a key twice")
		}
		if err := l.far.Map(KeysMax, Memory{Mem: l.remote[:8], Ticket: 1}); err == nil {
			t.Error("a key beyond the table")
		}
		var d []driver.Desc
		for key := uint32(100); key < 100+n; key += 997 {
			slot, err := l.conn.Import(Import{Key: key, Size: 8, Ticket: uint64(key)})
			require.NoError(t, err)
			d = append(d, driver.Desc{Local: uint64(key), Len: 8, LocalKey: testKey,
				RemoteKey: slot})
		}
		fill(l.local[:n+200], 3)
		require.NoError(t, errors.Join(submit(l.conn, driver.Write, 1, d, nil),
			l.outcome(t, 1)))
		for _, d := range d {
			if !bytes.Equal(l.local[d.Local:d.Local+8], l.remote[d.Local*8:d.Local*8+8]) {
				t.Fatalf("key %d: other bytes", d.Local)
			}
		}
		for key := uint32(100); key < 100+n; key++ {
			l.far.Unmap(key)
		}
		if err := errors.Join(submit(l.conn, driver.Write, 2, d, nil),
			l.outcome(t, 2)); !errors.Is(err, driver.ErrRevoked) {
			t.Fatalf("write to what is not there any more: %v", err)
		}
	})
}

func BenchmarkMap(b *testing.B) {
	for _, w := range ways[1:] {
		b.Run(w.name, func(b *testing.B) {
			l := openLane(b, w)
			key := uint32(100)
			for b.Loop() {
				if key >= 10100 {
					b.StopTimer()
					for ; key > 100; key-- {
						l.far.Unmap(key - 1)
					}
					b.StartTimer()
				}
				if err := l.far.Map(key, Memory{Mem: l.remote[:4096], Ticket: 1}); err != nil {
					b.Fatal(err)
				}
				key++
			}
		})
	}
}

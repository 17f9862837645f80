// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/sluicehq/sluice/driver"
)

// queued keeps so many batches under way, as perftest does with requests.
func (l *testLink) queued(b *testing.B, op driver.Op, n uint64, depth int) {
	d := l.descs(driver.Desc{Len: n})
	var done [64]Done
	under := 0
	wait := func(most int) {
		for under > most {
			k := l.near.Poll(done[:])
			if k == 0 {
				l.near.Drive()
			}
			for _, c := range done[:k] {
				if err := Error(c); err != nil {
					b.Fatal(err)
				}
			}
			under -= k
		}
	}
	b.SetBytes(int64(n))
	b.ReportAllocs()
	for b.Loop() {
		wait(depth - 1)
		l.tag++
		if err := l.conn.Submit(l.tag, batchOf(op, d, nil)); err != nil {
			b.Fatal(err)
		}
		under++
	}
	wait(0)
}

func benchVerbs(b *testing.B, d hosts) {
	l := openLink(b, d, testShape{spin: true, pairs: len(d.near), timeout: 16, retries: 6,
		config: Config{BatchesMax: 256, Depth: 128, SliceMax: 1 << 20, FlightMax: 16 << 20}})
	for _, op := range []driver.Op{driver.Write, driver.Read} {
		for _, n := range []uint64{64 << 10, 1 << 20} {
			b.Run(fmt.Sprintf("%v/%d", op, n), func(b *testing.B) { l.queued(b, op, n, 16) })
		}
		b.Run(fmt.Sprintf("%v/8/alone", op), func(b *testing.B) { l.queued(b, op, 8, 1) })
		b.Run(fmt.Sprintf("%v/8/queued", op), func(b *testing.B) { l.queued(b, op, 8, 128) })
		b.Run(fmt.Sprintf("%v/pages", op), func(b *testing.B) { l.pages(b, op) })
	}
}

// pages is 656 B x 2,048 into one run of the peer's memory.
func (l *testLink) pages(b *testing.B, op driver.Op) {
	p := l.pattern(2048, 656, 1312, 656)
	before := l.counters(b)
	b.SetBytes(int64(p.Bytes()))
	b.ReportAllocs()
	for b.Loop() {
		l.tag++
		if err := l.conn.Submit(l.tag, &driver.Batch{Op: op, Pattern: p}); err != nil {
			b.Fatal(err)
		}
		if err := Error(l.take(b)); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(l.counters(b).Requests-before.Requests)/float64(b.N), "requests/op")
}

// opposite is the same connection the other way round.
func (l *testLink) opposite(b *testing.B) *testLink {
	o := &testLink{near: l.far, far: l.near, local: l.remote, remote: l.local, shape: l.shape,
		wake: l.farWake, news: l.news, closed: true}
	var err error
	if o.conn, err = o.near.Connect(true, 0); err == nil {
		o.back, err = o.far.Connect(false, 0)
	}
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { o.conn.Close(); o.back.Close() })
	o.make(b, 0)
	o.awaitNews(b, PairLive)
	o.slot = o.imported(b)
	return o
}

// ball is a word of 8 bytes that a peer writes.
func ball(mem []byte, at int) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&mem[at])) }

// throw writes a word to the other end, when the one before it is over.
func (l *testLink) throw(b *testing.B, d []driver.Desc, v uint64) {
	var done [1]Done
	if v > 1 {
		for l.near.Poll(done[:]) == 0 {
			l.near.Drive()
		}
	}
	ball(l.local, 64).Store(v)
	if err := l.conn.Submit(v, batchOf(driver.Write, d, nil)); err != nil || done[0].Status != 0 {
		b.Error(err, done[0])
	}
}

// pingVerbs is ib_write_lat: each end sees the other's write in its memory, and writes back. An
// operation is one way.
func pingVerbs(b *testing.B, d hosts) {
	l := openLink(b, d, testShape{spin: true, timeout: 16, retries: 6})
	o := l.opposite(b)
	to := []driver.Desc{{Local: 64, Remote: 128, Len: 8, LocalKey: testKey}}
	fro := append([]driver.Desc(nil), to...)
	to[0].RemoteKey, fro[0].RemoteKey = l.slot, o.slot
	trips := uint64(b.N+1) / 2
	var pong sync.WaitGroup
	pong.Go(func() {
		for v := uint64(1); v <= trips; v++ {
			for ball(l.remote, 128).Load() != v {
			}
			o.throw(b, fro, v)
		}
	})
	ways := make([]time.Duration, trips)
	b.ResetTimer()
	for v := uint64(1); v <= trips; v++ {
		from := time.Now()
		l.throw(b, to, v)
		for ball(l.local, 128).Load() != v {
		}
		ways[v-1] = time.Since(from) / 2
	}
	b.StopTimer()
	slices.Sort(ways)
	b.ReportMetric(float64(ways[trips/10])/1e3, "p10-us")
	b.ReportMetric(float64(ways[trips/2])/1e3, "p50-us")
	pong.Wait()
	var done [1]Done
	for _, end := range []*Context{l.near, l.far} {
		for end.Poll(done[:]) == 0 {
			end.Drive()
		}
	}
}

func BenchmarkVerbsPing(b *testing.B)     { pingVerbs(b, fakeDevices(b, 1)) }
func BenchmarkRealVerbsPing(b *testing.B) { pingVerbs(b, realDevices(b, 1)) }

func BenchmarkVerbs(b *testing.B)     { benchVerbs(b, fakeDevices(b, 1)) }
func BenchmarkRealVerbs(b *testing.B) { benchVerbs(b, realDevices(b, 1)) }

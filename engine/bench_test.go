// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// pair returns two connected engines over mem with a region each.
func pair(t testing.TB, n uint64) (p *Peer, src *Region, m *Remote, dst *Region) {
	a, b := open(t, "a"), open(t, "b")
	src, dst = register(t, a, "src", n), register(t, b, "dst", n)
	p = connect(t, a, b)
	return p, src, remote(t, p, "dst"), dst
}

// postAndSpin is Post to completion as a goroutine does that does not sleep.
func postAndSpin(t *Transfer) error {
	if err := t.Post(); err != nil {
		return err
	}
	for !t.Done() {
	}
	return t.Err()
}

func TestNoAllocations(t *testing.T) {
	p, src, m, _ := pair(t, 1<<22)
	pages := Pages{Count: 2048, EntryLen: 656, LocalStride: 656, RemoteStride: 1024}
	for i := range 2048 {
		pages.Local = append(pages.Local, uint32(rand.IntN(2048)))
		pages.Remote = append(pages.Remote, uint32(i))
	}
	for name, list := range map[string]func(*Transfer) error{
		"1 byte": func(tr *Transfer) error { return tr.Add(src, 0, m, 0, 1) },
		"1 MiB":  func(tr *Transfer) error { return tr.Add(src, 0, m, 0, 1<<20) },
		"64 descs": func(tr *Transfer) error {
			for i := range uint64(64) {
				if err := tr.Add(src, i*1000, m, i*2000, 656); err != nil {
					return err
				}
			}
			return nil
		},
		"pages": func(tr *Transfer) error { return tr.AddPages(src, m, pages) },
	} {
		tr := transfer(t, p, Write)
		check(t, list(tr))
		var failed error
		post := func() {
			if err := tr.Post(); err != nil {
				failed = err
			}
			if err := tr.Wait(context.Background()); err != nil {
				failed = err
			}
		}
		post()
		if n := testkit.AllocsPerRun(100, post); n != 0 || failed != nil {
			t.Errorf("%s: %v allocations from Post to the end of Wait, %v", name, n, failed)
		}
	}
}

func BenchmarkPost(b *testing.B) {
	p, src, m, dst := pair(b, 1<<22)
	for _, n := range []uint64{1, 656, 4096, 1 << 16} {
		b.Run(fmt.Sprintf("%dB", n), func(b *testing.B) {
			tr := transfer(b, p, Write)
			check(b, tr.Add(src, 0, m, 0, n))
			b.SetBytes(int64(n))
			b.ReportAllocs()
			for b.Loop() {
				check(b, postAndSpin(tr))
			}
		})
	}
	b.Run("2048descs", func(b *testing.B) { benchmarkDescs(b, p, src, m, dst, 2048) })
	b.Run("64descs", func(b *testing.B) { benchmarkDescs(b, p, src, m, dst, 64) })
}

// benchmarkDescs alternates a batch of 8-byte pieces with the same copies in a
// loop, and reports what the engine adds to each.
func benchmarkDescs(b *testing.B, p *Peer, src *Region, m *Remote, dst *Region, n uint64) {
	tr := transfer(b, p, Write)
	for i := range n {
		check(b, tr.Add(src, i*64, m, i*128, 8))
	}
	var batches, copies time.Duration
	for b.Loop() {
		start := time.Now()
		check(b, postAndSpin(tr))
		middle := time.Now()
		for i := range n {
			copy(dst.Bytes()[i*128:][:8], src.Bytes()[i*64:][:8])
		}
		batches += middle.Sub(start)
		copies += time.Since(middle)
	}
	b.ReportMetric(float64(batches-copies)/float64(b.N)/float64(n), "added-ns/desc")
}

// BenchmarkPostShm alternates a batch of 64 x 656 bytes over shm with the same
// copies in a loop, and reports what a request adds.
func BenchmarkPostShm(b *testing.B) {
	owner, from := open(b, "owner", overShm(b)), open(b, "from", overShm(b))
	dst, src := register(b, owner, "dst", 1<<20), register(b, from, "src", 1<<20)
	p := connect(b, from, owner)
	t := transfer(b, p, Write)
	for i := range uint64(64) {
		check(b, t.Add(src, i*1312, remote(b, p, "dst"), i*1312, 656))
	}
	var requests, copies time.Duration
	for b.Loop() {
		start := time.Now()
		check(b, postAndSpin(t))
		middle := time.Now()
		for i := range 64 {
			copy(dst.Bytes()[i*1312:][:656], src.Bytes()[i*1312:][:656])
		}
		requests += middle.Sub(start)
		copies += time.Since(middle)
	}
	b.ReportMetric(float64(requests-copies)/float64(b.N), "added-ns/op")
	b.ReportMetric(float64(copies)/float64(b.N), "copy-ns/op")
}

// overShm has an engine use shm.
func overShm(b testing.TB) func(*Config) {
	s, err := shm.New(shm.Config{})
	check(b, err)
	return over(s)
}

// BenchmarkIdle reports the share of one core that an engine with eight peers
// takes while nothing happens.
func BenchmarkIdle(b *testing.B) {
	cpuTime := func() time.Duration { // of this process so far
		var u unix.Rusage
		check(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	e := open(b, "idle", overShm(b))
	for i := range 8 {
		other := open(b, fmt.Sprint("peer ", i), overShm(b))
		connect(b, e, other)
		connect(b, other, e)
	}
	time.Sleep(100 * time.Millisecond) // what connecting left to do
	for b.Loop() {
		start, before := time.Now(), cpuTime()
		time.Sleep(2 * time.Second)
		b.ReportMetric(100*float64(cpuTime()-before)/float64(time.Since(start)), "%core")
	}
}

// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"runtime"
	"runtime/debug"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// BenchmarkIdle holds as many idle connections as the limit of descriptors allows, at most
// 10,000, to an owner that is another process, and reports what an end of this side holds and
// which part of a core all of them take.
func BenchmarkIdle(b *testing.B) {
	const most, perPeer, reserve = 10000, 2, 200
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		b.Fatal(err)
	}
	peers := min(most, int(limit.Max)-reserve) / perPeer
	o := startOwner(b)
	near := open(b, Config{Conns: perPeer - 1})
	used := func() uint64 {
		settleMemory()
		return heapAndStacks()
	}
	_ = dial(b, near, o.addr)
	before := used()
	for range peers {
		_ = dial(b, near, o.addr)
	}
	each := (used() - before) / uint64(peers*perPeer)
	time.Sleep(time.Second)
	const watched = 5 * time.Second
	for b.Loop() {
		spent := processor(b)
		time.Sleep(watched)
		b.ReportMetric(float64(processor(b)-spent)/float64(watched)*100, "%-of-a-core")
	}
	b.ReportMetric(float64(peers*perPeer), "connections")
	b.ReportMetric(float64(each), "B/end")
	b.ReportMetric(0, "ns/op")
}

// processor is what this process has used of it.
func processor(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// settleMemory gives back what is not in use, stacks included.
func settleMemory() {
	for range 3 {
		runtime.GC()
	}
	debug.FreeOSMemory()
}

// heapAndStacks is what this process uses.
func heapAndStacks() uint64 {
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return s.HeapInuse + s.StackInuse
}

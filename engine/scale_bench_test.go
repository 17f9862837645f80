// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// openShm opens an engine over shm with one region of its own.
func openShm(t testing.TB, name string, n uint64, onPeer func(*engine.Peer)) (*engine.Engine,
	*engine.Region) {
	t.Helper()
	b, err := shm.New(shm.Config{})
	require.NoError(t, err)
	e, err := engine.Open(engine.Config{Name: name, Backends: []driver.Backend{b}, OnPeer: onPeer})
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Errorf("close %s: %v", name, err)
		}
	})
	buffer, err := hostmem.Alloc(n, hostmem.Options{Purpose: "test"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = buffer.Close() })
	r, err := e.Register(name, buffer.Segment())
	require.NoError(t, err)
	return e, r
}

// BenchmarkPostShm alternates a batch of 64 x 656 bytes over shm with the same
// copies in a loop, and reports what a request adds.
func BenchmarkPostShm(b *testing.B) {
	owner, dst := openShm(b, "owner", 1<<20, nil)
	from, src := openShm(b, "from", 1<<20, nil)
	p := join(b, from, owner)
	m, err := p.Remote("owner")
	if err != nil {
		b.Fatal(err)
	}
	t, err := from.NewTransfer(p, engine.Write, engine.Route{})
	if err != nil {
		b.Fatal(err)
	}
	for i := range uint64(64) {
		if err := t.Add(src, i*1312, m, i*1312, 656); err != nil {
			b.Fatal(err)
		}
	}
	var requests, copies time.Duration
	for b.Loop() {
		start := time.Now()
		if err := t.Post(); err != nil {
			b.Fatal(err)
		}
		for !t.Done() {
		}
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

// cpuTime is what this process has used so far.
func cpuTime(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkIdle reports the share of one core that an engine with eight peers
// takes while nothing happens.
func BenchmarkIdle(b *testing.B) {
	e, _ := openShm(b, "idle", 1<<16, nil)
	for i := range 8 {
		other, _ := openShm(b, fmt.Sprint("peer ", i), 1<<16, nil)
		join(b, e, other)
		join(b, other, e)
	}
	time.Sleep(100 * time.Millisecond) // what connecting left to do
	for b.Loop() {
		start, before := time.Now(), cpuTime(b)
		time.Sleep(2 * time.Second)
		b.ReportMetric(100*float64(cpuTime(b)-before)/float64(time.Since(start)), "%core")
	}
}

func join(b testing.TB, from, to *engine.Engine) *engine.Peer {
	d, err := to.Describe()
	if err != nil {
		b.Fatal(err)
	}
	p, err := from.Connect(context.Background(), d)
	if err != nil {
		b.Fatal(err)
	}
	return p
}

// BenchmarkRegister registers ranges of one allocation under names.
func BenchmarkRegister(b *testing.B) {
	const count = 16000
	e, whole := openShm(b, "whole", count*64, nil)
	seg := whole.Segment()
	names := make([]string, count)
	for i := range names {
		names[i] = fmt.Sprintf("kv.%05d", i)
	}
	for b.Loop() {
		start := time.Now()
		regions := make([]*engine.Region, count)
		for i := range regions {
			part, err := seg.Slice(uint64(i)*64, 64, [16]byte{})
			if err == nil {
				regions[i], err = e.Register(names[i], part)
			}
			if err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(time.Since(start).Nanoseconds())/count, "ns/region")
		for _, r := range regions {
			if err := r.Close(); err != nil {
				b.Fatal(err)
			}
		}
	}
}

// BenchmarkRegisterLarge registers 8 GiB that nobody has touched: bookkeeping
// only.
func BenchmarkRegisterLarge(b *testing.B) {
	m, err := engine.Alloc(8<<30, engine.AllocOptions{})
	if err != nil {
		b.Fatal(err)
	}
	defer m.Close()
	e, _ := openShm(b, "large", 1<<16, nil)
	var before, after runtime.MemStats
	for b.Loop() {
		runtime.ReadMemStats(&before)
		r, err := e.Register("8 GiB", m.Segment())
		runtime.ReadMemStats(&after)
		if err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(after.TotalAlloc-before.TotalAlloc), "B-bookkeeping")
		if err := r.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

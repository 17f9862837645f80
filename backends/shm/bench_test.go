// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// bench is two backends of one process; the peer's memory has its own mapping,
// as in two processes.
type bench struct {
	b           *testing.B
	near        *Backend
	p           *peer
	local       []byte
	remote      []byte // the owner's view
	localKey    uint32
	remoteKey   uint32
	tag         uint64
	completions [1]driver.Completion
}

func newBench(b *testing.B, cfg Config, n uint64) *bench {
	owner, near := open(b, cfg), open(b, cfg)
	far, remote := share(b, owner, populated, n)
	m, local := share(b, near, populated, n)
	p := dial(b, near, owner.Addr())
	token, err := far.AppendToken(nil)
	if err != nil {
		b.Fatal(err)
	}
	key, _, err := p.Import(token)
	if err != nil {
		b.Fatal(err)
	}
	fill(local, 1)
	return &bench{b: b, near: near, p: p, local: local, remote: remote, localKey: m.Key(),
		remoteKey: key}
}

// run submits, spins for 20 us and then sleeps until the end, as the engine does.
func (x *bench) run(submit func(tag uint64) error) {
	x.tag++
	require.NoError(x.b, submit(x.tag))
	for begin := time.Now(); ; {
		n, err := x.near.Poll(x.completions[:])
		require.NoError(x.b, err)
		if n == 1 {
			if x.completions[0].Err != nil {
				x.b.Fatal(x.completions[0].Err)
			}
			return
		}
		if time.Since(begin) > 20*time.Microsecond {
			x.sleep()
		}
	}
}

func (x *bench) sleep() {
	if ready, err := x.near.Arm(); err != nil || ready {
		return
	}
	fds := []unix.PollFd{{Fd: int32(x.near.FD()), Events: unix.POLLIN}}
	_, _ = unix.Poll(fds, 1000)
	var drain [8]byte
	_, _ = unix.Read(x.near.FD(), drain[:])
}

// beside alternates blocks of ours and of each other way, and reports the median
// time of one and the ratio of the others' to ours (over 1: we are faster).
func beside(b *testing.B, block int, ours func(), names []string, others ...func()) {
	times := make([][]float64, 1+len(others))
	one := func(i int, f func()) {
		begin := time.Now()
		for range block {
			f()
		}
		times[i] = append(times[i], float64(time.Since(begin))/float64(block))
	}
	for range 3 {
		ours()
		for _, f := range others {
			f()
		}
	}
	for range b.N {
		one(0, ours)
		for i, f := range others {
			one(1+i, f)
		}
	}
	mine := median(times[0])
	b.ReportMetric(mine, "median-ns")
	for i, name := range names {
		b.ReportMetric(median(times[1+i]), name+"-ns")
		b.ReportMetric(median(times[1+i])/mine, "x-"+name)
	}
}

func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}

// hands are who copies: the caller of Submit, as for small batches, or one worker.
var hands = map[string]Config{"caller": {InlineMax: 64 << 20}, "worker": {}}

// BenchmarkLarge writes pieces of 1 MiB, beside one thread of memcpy.
func BenchmarkLarge(b *testing.B) {
	for name, count := range map[string]int{"1x1MiB": 1, "16x1MiB": 16} {
		for hand, cfg := range hands {
			b.Run(name+"/"+hand, func(b *testing.B) {
				x := newBench(b, cfg, 64<<20)
				var descs []driver.Desc
				for i := range uint64(count) {
					descs = append(descs, driver.Desc{Local: i << 20, Remote: i << 21, Len: 1 << 20,
						LocalKey: x.localKey, RemoteKey: x.remoteKey})
				}
				batch := &driver.Batch{Op: driver.Write, Descs: descs}
				beside(b, 4, func() {
					x.run(func(tag uint64) error { return x.p.Submit(tag, batch) })
				},
					[]string{"memcpy"}, func() { plain(x, descs) })
			})
		}
	}
}

func plain(x *bench, descs []driver.Desc) {
	for i := range descs {
		d := &descs[i]
		copy(x.remote[d.Remote:d.Remote+d.Len], x.local[d.Local:d.Local+d.Len])
	}
}

// BenchmarkPages writes 2,048 random entries of 656 bytes, beside a loop of
// memcpy and two calls of process_vm_writev.
func BenchmarkPages(b *testing.B) {
	for hand, cfg := range hands {
		b.Run(hand, func(b *testing.B) {
			s := newScatter(newBench(b, cfg, scatterBytes))
			beside(b, 1, s.ours, []string{"memcpy", "vm-writev"}, s.loop, s.vector)
		})
	}
}

// The entries lie in a memory that is several times the largest caches.
const scatterCount, scatterEntry, scatterBytes = 2048, 656, 1 << 30

const scatterPlaces = scatterBytes / scatterEntry

type scatter struct {
	x      *bench
	perm   []int
	at     int
	pages  driver.Pattern
	batch  driver.Batch
	local  [scatterCount]unix.Iovec
	remote [scatterCount]unix.RemoteIovec
}

func newScatter(x *bench) *scatter {
	s := &scatter{x: x, perm: rand.New(rand.NewPCG(1, 2)).Perm(scatterPlaces),
		pages: driver.Pattern{
			Count: scatterCount, Run: scatterEntry, LocalKey: x.localKey, RemoteKey: x.remoteKey,
			Local:  driver.Side{Stride: scatterEntry, List: make([]uint32, scatterCount)},
			Remote: driver.Side{Stride: scatterEntry, List: make([]uint32, scatterCount)}}}
	s.batch = driver.Batch{Op: driver.Write, Pattern: &s.pages}
	return s
}

// next draws other places, none of which comes again before all others did.
func (s *scatter) next() {
	for i := range scatterCount {
		s.pages.Local.List[i] = uint32(s.perm[(s.at+i)%scatterPlaces])
		s.pages.Remote.List[i] = uint32(s.perm[(s.at+i+7777)%scatterPlaces])
	}
	s.at += scatterCount
}

func (s *scatter) ours() {
	s.next()
	s.x.run(func(tag uint64) error { return s.x.p.Submit(tag, &s.batch) })
}

func (s *scatter) loop() {
	s.next()
	for i := range scatterCount {
		l, r := s.pages.Local.At(i), s.pages.Remote.At(i)
		copy(s.x.remote[r:r+scatterEntry], s.x.local[l:l+scatterEntry])
	}
}

func (s *scatter) vector() {
	s.next()
	for i := range scatterCount {
		s.local[i].Base = &s.x.local[s.pages.Local.At(i)]
		s.local[i].SetLen(scatterEntry)
		s.remote[i] = unix.RemoteIovec{Base: uintptr(addressOf(s.x.remote) + s.pages.Remote.At(i)),
			Len: scatterEntry}
	}
	for i := 0; i < scatterCount; i += vectorsMax {
		if _, err := unix.ProcessVMWritev(os.Getpid(), s.local[i:i+vectorsMax],
			s.remote[i:i+vectorsMax], 0); err != nil {
			s.x.b.Fatal(err)
		}
	}
}

// BenchmarkBatch writes 64 entries of 656 bytes, beside memcpy of the same: all
// of it stays in a cache, so that the difference is what a request costs.
func BenchmarkBatch(b *testing.B) {
	x := newBench(b, Config{}, 4<<20)
	var descs []driver.Desc
	for i := range uint64(64) {
		descs = append(descs, driver.Desc{Local: i * 1000, Remote: (63 - i) * 1000, Len: 656,
			LocalKey: x.localKey, RemoteKey: x.remoteKey})
	}
	batch := &driver.Batch{Op: driver.Write, Descs: descs}
	beside(b, 64, func() { x.run(func(tag uint64) error { return x.p.Submit(tag, batch) }) },
		[]string{"memcpy"}, func() { plain(x, descs) })
}

// BenchmarkSmall writes 64 bytes, beside memcpy of the same.
func BenchmarkSmall(b *testing.B) {
	x := newBench(b, Config{}, 4<<20)
	descs := []driver.Desc{{Len: 64, LocalKey: x.localKey, RemoteKey: x.remoteKey}}
	batch := &driver.Batch{Op: driver.Write, Descs: descs}
	beside(b, 256, func() { x.run(func(tag uint64) error { return x.p.Submit(tag, batch) }) },
		[]string{"memcpy"}, func() { plain(x, descs) })
}

// populated makes memory whose pages are all there from the start, as those of a pool are.
func populated(n uint64) (*drivertest.Space, error) {
	buf, err := hostmem.Alloc(n, hostmem.Options{Purpose: "bench", Populate: true})
	if err != nil {
		return nil, err
	}
	return &drivertest.Space{Segment: buf.Segment(), Free: buf.Close}, nil
}

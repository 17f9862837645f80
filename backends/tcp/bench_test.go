// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"crypto/tls"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// bench is two backends of one process, and beside them bare sockets that move the same bytes:
// a connection for each of ours, a goroutine at either end that does nothing but write and
// read, and a byte back when all is there.
type bench struct {
	b           *testing.B
	near        *Backend
	p           *peer
	local       []byte
	remote      []byte
	localKey    uint32
	remoteKey   uint32
	tag         uint64
	completions [1]driver.Completion
}

func newBench(b *testing.B, cfg Config, n uint64) *bench {
	owner, near := open(b, cfg), open(b, cfg)
	far, remote := share(b, owner, n)
	m, local := share(b, near, n)
	p := dial(b, near, owner.Addr())
	fill(local, 1)
	return &bench{b: b, near: near, p: p, local: local, remote: remote, localKey: m.key,
		remoteKey: take(b, p, far)}
}

// run submits and waits for the end as the engine does.
func (x *bench) run(submit func(tag uint64) error) {
	x.tag++
	require.NoError(x.b, submit(x.tag))
	x.p.Help(x.tag, nil)
	for {
		n, err := x.near.Poll(x.completions[:])
		require.NoError(x.b, err)
		if n == 1 {
			if x.completions[0].Err != nil {
				x.b.Fatal(x.completions[0].Err)
			}
			return
		}
		x.sleep()
	}
}

func (x *bench) sleep() {
	if ready, err := x.near.Arm(); err != nil || ready {
		return
	}
	_ = x.near.event.Wait()
}

func (x *bench) write(descs []driver.Desc) {
	x.run(func(tag uint64) error {
		return x.p.Submit(tag, &driver.Batch{Op: driver.Write, Descs: descs})
	})
}

// spread lists pieces that are adjacent here and not adjacent there.
func (x *bench) spread(size, count uint64) (descs []driver.Desc) {
	for i := range count {
		descs = append(descs, driver.Desc{
			Local: i * size, Remote: 2 * i * size, Len: size, LocalKey: x.localKey,
			RemoteKey: x.remoteKey})
	}
	return descs
}

// beside alternates blocks of ours and of another way, and reports the median time of one, and
// the median of the ratios of the other's to ours (over 1: we are faster).
func beside(b *testing.B, block int, ours, other func()) {
	var mine, its, ratios []float64
	one := func(f func()) float64 {
		begin := time.Now()
		for range block {
			f()
		}
		return float64(time.Since(begin)) / float64(block)
	}
	for range 3 {
		one(ours)
		one(other)
	}
	for b.Loop() {
		m, o := one(ours), one(other)
		mine, its, ratios = append(mine, m), append(its, o), append(ratios, o/m)
	}
	b.ReportMetric(median(mine), "median-ns")
	b.ReportMetric(median(its), "socket-ns")
	b.ReportMetric(median(ratios), "x-socket")
}

func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}

// sockets are bare connections within this process.
type sockets struct {
	b    *testing.B
	near []net.Conn
	work []chan []byte
	done chan struct{}
}

// newSockets has each connection receive as many bytes a time as its memory has.
func newSockets(b *testing.B, secure *tls.Config, into [][]byte) *sockets {
	s := &sockets{b: b, done: make(chan struct{}, len(into))}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	for _, mem := range into {
		near, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			b.Fatal(err)
		}
		far, err := l.Accept()
		if err != nil {
			b.Fatal(err)
		}
		if secure != nil {
			near, far = tls.Client(near, secure), tls.Server(far, secure)
		}
		b.Cleanup(func() { _ = near.Close(); _ = far.Close() })
		s.near = append(s.near, near)
		go echoDone(far, mem)
	}
	return s
}

// echoDone answers each time mem is full with a byte.
func echoDone(far net.Conn, mem []byte) {
	for {
		if _, err := io.ReadFull(far, mem); err != nil {
			return
		}
		if _, err := far.Write(mem[:1]); err != nil {
			return
		}
	}
}

// send writes to all at once and returns when each has answered.
func (s *sockets) send(from [][]byte) {
	var wg sync.WaitGroup
	for i, near := range s.near[1:] {
		wg.Go(func() { s.one(near, from[i+1]) })
	}
	s.one(s.near[0], from[0])
	wg.Wait()
}

func (s *sockets) one(near net.Conn, from []byte) {
	var back [1]byte
	if _, err := near.Write(from); err != nil {
		s.b.Error(err)
	}
	if _, err := io.ReadFull(near, back[:]); err != nil {
		s.b.Error(err)
	}
}

// parts cuts memory for as many connections as carry it.
func parts(mem []byte, n int) (list [][]byte) {
	each := len(mem) / n
	for i := range n {
		list = append(list, mem[i*each:][:each])
	}
	return list
}

// BenchmarkLarge writes contiguous pieces, over several numbers of connections.
func BenchmarkLarge(b *testing.B) {
	for _, shape := range []struct {
		name  string
		n     uint64
		count uint64
	}{{"16x1MiB", 1 << 20, 16}, {"64x64KiB", 64 << 10, 64}} {
		for _, conns := range []int{1, 2, 3, 5} {
			b.Run(fmt.Sprintf("%s/%d", shape.name, conns), func(b *testing.B) {
				x := newBench(b, Config{Conns: conns}, 64<<20)
				descs := x.spread(shape.n, shape.count)
				total := shape.n * shape.count
				carriers := len(x.p.carriers())
				s := newSockets(b, nil, parts(x.remote[32<<20:][:total], carriers))
				from := parts(x.local[:total], carriers)
				beside(b, 4, func() { x.write(descs) }, func() { s.send(from) })
			})
		}
	}
}

// BenchmarkSecure is BenchmarkLarge beside connections of crypto/tls.
func BenchmarkSecure(b *testing.B) {
	secure := sharedAuthority.config()
	bare := secure.Clone()
	bare.InsecureSkipVerify, bare.MinVersion = true, tls.VersionTLS13
	for _, size := range []uint64{1 << 20, 64 << 10} {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			x := newBench(b, Config{TLS: secure}, 64<<20)
			descs := x.spread(size, 16<<20/size)
			carriers := len(x.p.carriers())
			s := newSockets(b, bare, parts(x.remote[32<<20:][:16<<20], carriers))
			from := parts(x.local[:16<<20], carriers)
			beside(b, 2, func() { x.write(descs) }, func() { s.send(from) })
		})
	}
}

// BenchmarkRead reads what it then writes: the ratio is the write's time over the read's.
func BenchmarkRead(b *testing.B) {
	for _, shape := range [][2]uint64{{1 << 20, 16}, {64 << 10, 64}, {656, 2048}, {656, 64},
		{656, 1}} {
		b.Run(fmt.Sprintf("%dx%dB", shape[1], shape[0]), func(b *testing.B) {
			x := newBench(b, Config{}, 64<<20)
			descs := x.spread(shape[0], shape[1])
			beside(b, 4, func() {
				x.run(func(tag uint64) error {
					return x.p.Submit(tag, &driver.Batch{Op: driver.Read, Descs: descs})
				})
			}, func() { x.write(descs) })
		})
	}
}

// BenchmarkSmall writes pieces that stay in a cache: what differs is what a request costs.
func BenchmarkSmall(b *testing.B) {
	for _, count := range []uint64{1, 64} {
		b.Run(fmt.Sprintf("%dx656B", count), func(b *testing.B) {
			x := newBench(b, Config{}, 4<<20)
			var descs []driver.Desc
			for i := range count {
				descs = append(descs, driver.Desc{
					Local: i * 1000, Remote: (count - 1 - i) * 1000, Len: 656, LocalKey: x.localKey,
					RemoteKey: x.remoteKey})
			}
			s := newSockets(b, nil, [][]byte{x.remote[1<<20:][:count*656]})
			from := [][]byte{x.local[:count*656]}
			beside(b, 64, func() { x.write(descs) }, func() { s.send(from) })
		})
	}
}

// The entries lie in a memory that is several times the largest caches.
const scatterCount, scatterEntry, scatterBytes = 2048, 656, 512 << 20

// BenchmarkPages writes random entries, beside contiguous bytes over bare sockets: the best that
// there could be.
func BenchmarkPages(b *testing.B) {
	x := newBench(b, Config{}, scatterBytes)
	const places = scatterBytes / scatterEntry
	perm := rand.New(rand.NewPCG(1, 2)).Perm(places)
	side := func() driver.Side {
		return driver.Side{Stride: scatterEntry, List: make([]uint32, scatterCount)}
	}
	pattern := driver.Pattern{
		Count: scatterCount, Run: scatterEntry, Local: side(), Remote: side(),
		LocalKey: x.localKey, RemoteKey: x.remoteKey}
	at := 0
	next := func() { // other places, none of which comes again before all others did
		for i := range scatterCount {
			pattern.Local.List[i] = uint32(perm[(at+i)%places])
			pattern.Remote.List[i] = uint32(perm[(at+i+7777)%places])
		}
		at += scatterCount
	}
	carriers := len(x.p.carriers())
	total := scatterCount * scatterEntry
	s := newSockets(b, nil, parts(x.remote[:total], carriers))
	from := parts(x.local[:total], carriers)
	beside(b, 1, func() {
		next()
		x.run(func(tag uint64) error {
			return x.p.Submit(tag, &driver.Batch{Op: driver.Write, Pattern: &pattern})
		})
	}, func() { s.send(from) })
}

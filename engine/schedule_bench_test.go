// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluicehq/sluice/backends/posix"
	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/driver"
)

// BenchmarkSwapInsBesideAFlood measures swap-ins of 8 MiB, as long as a batch of kv/cache, alone
// and beside swap-outs of 64 MiB of which four are posted at any time: by an engine without a
// schedule and by one with it, in turns. Alone, swap-ins take a twentieth of the time: what lies
// between two of them is as long in all phases.
//
//	go test ./engine -run XXX -bench SwapInsBesideAFlood -benchtime 5x
//
// p99 and p50 are by those of swap-ins alone; flood is the bytes of the swap-outs a second by those
// of a flood alone, and total is those of both.
func BenchmarkSwapInsBesideAFlood(b *testing.B) {
	for name, open := range map[string]func(*testing.B, *Schedule) *flooded{
		"shm":   func(b *testing.B, s *Schedule) *flooded { return floodPeers(b, s, overShm) },
		"tcp":   func(b *testing.B, s *Schedule) *flooded { return floodPeers(b, s, overTCP) },
		"files": floodFile,
	} {
		b.Run(name, func(b *testing.B) {
			plain, scheduled := open(b, nil), open(b, &Schedule{})
			var alone, beside, sorted sample
			var flood rate
			for b.Loop() {
				plain.measure(b, true, false, &alone, &rate{})
				plain.pause = time.Duration(19 * alone.quantile(50) * float64(time.Second))
				scheduled.pause = plain.pause
				plain.measure(b, false, true, &sample{}, &flood)
				plain.measure(b, true, true, &beside, &beside.flood)
				scheduled.measure(b, true, true, &sorted, &sorted.flood)
			}
			for unit, s := range map[string]*sample{"plain": &beside, "scheduled": &sorted} {
				for _, q := range []int{50, 99} {
					b.ReportMetric(s.quantile(q)/alone.quantile(q), fmt.Sprintf("p%d-%s", q, unit))
				}
				b.ReportMetric(s.flood.perSecond()/flood.perSecond(), "flood-"+unit)
				total := rate{s.flood.bytes + float64(len(s.took))*swapInBytes, s.flood.took}
				b.ReportMetric(total.perSecond()/flood.perSecond(), "total-"+unit)
			}
			b.ReportMetric(alone.quantile(99)*1e3, "ms/p99-alone")
			b.ReportMetric(flood.perSecond()/1e9, "GB/s-flood-alone")
		})
	}
}

const (
	swapInBytes = 8 << 20
	floodBytes  = 64 << 20
	floodPosts  = 4
	phaseTime   = 2 * time.Second
)

// flooded has what the two kinds of transfers move.
type flooded struct {
	swapIn *Transfer
	flood  [floodPosts]*Transfer
	pause  time.Duration // between two swap-ins
}

// sample is the durations of swap-ins, in seconds, and what a flood beside them moved.
type sample struct {
	took  []float64
	flood rate
}

func (s *sample) quantile(percent int) float64 {
	slices.Sort(s.took)
	return s.took[len(s.took)*percent/100]
}

type rate struct{ bytes, took float64 }

func (r rate) perSecond() float64 { return r.bytes / r.took }

// measure runs swap-ins, a flood, or both, for phaseTime.
func (f *flooded) measure(b *testing.B, swapIns, flood bool, s *sample, r *rate) {
	var all sync.WaitGroup
	var moved atomic.Int64
	begin, end := time.Now(), make(chan struct{})
	if flood {
		for _, t := range f.flood {
			all.Go(func() {
				for {
					select {
					case <-end:
						return
					default:
					}
					if err := postAndWait(b, t); err != nil {
						b.Error(err)
						return
					}
					moved.Add(floodBytes)
				}
			})
		}
	}
	for time.Since(begin) < phaseTime {
		time.Sleep(max(f.pause, time.Millisecond))
		if swapIns {
			start := time.Now()
			check(b, postAndWait(b, f.swapIn))
			s.took = append(s.took, time.Since(start).Seconds())
		}
	}
	close(end)
	all.Wait() // the last ones count, and their time
	r.bytes += float64(moved.Load())
	r.took += time.Since(begin).Seconds()
}

func postAndWait(b *testing.B, t *Transfer) error {
	if err := t.Post(); err != nil {
		return err
	}
	return t.Wait(b.Context())
}

// fill makes the transfers: swap-ins of one kind, and the flood of the other.
func (f *flooded) fill(b *testing.B, p *Peer, in, out Op, local *Region, to *Remote) *flooded {
	make := func(op Op, c Class, at, n uint64) *Transfer {
		t := transfer(b, p, op)
		check(b, t.Schedule(c, time.Time{}))
		check(b, t.Add(local, at, to, at, n))
		return t
	}
	f.swapIn = make(in, SwapIn, 0, swapInBytes)
	for i := range f.flood {
		f.flood[i] = make(out, SwapOut, swapInBytes+uint64(i)*floodBytes, floodBytes)
	}
	return f
}

// floodSpan is the memory of all transfers.
const floodSpan = swapInBytes + floodPosts*floodBytes

// floodPeers has the node write its swap-ins to a peer, and read its swap-outs from there.
func floodPeers(b *testing.B, s *Schedule, by func(testing.TB) func(*Config)) *flooded {
	node := open(b, "node", by(b), func(c *Config) { c.Schedule = s })
	server := open(b, "server", by(b))
	local := register(b, node, "local", floodSpan)
	register(b, server, "kv", floodSpan)
	p := connect(b, node, server)
	return (&flooded{}).fill(b, p, Write, Read, local, remote(b, p, "kv"))
}

// overTCP has an engine use tcp.
func overTCP(b testing.TB) func(*Config) {
	s, err := tcp.New(tcp.Config{Plaintext: true, Listen: "127.0.0.1:0"})
	check(b, err)
	return over(s)
}

// floodFile has the node read its swap-ins from a file, and write its swap-outs there: in the
// folder that SLUICE_DISK names, or in a temporary one.
func floodFile(b *testing.B, s *Schedule) *flooded {
	backend, err := posix.New(posix.Config{})
	check(b, err)
	node := open(b, "node", over(backend), func(c *Config) { c.Schedule = s })
	dir := b.TempDir()
	if disk := os.Getenv("SLUICE_DISK"); disk != "" {
		dir, err = os.MkdirTemp(disk, "sluice-flood")
		check(b, err)
		b.Cleanup(func() { _ = os.RemoveAll(dir) })
	}
	file, err := os.Create(filepath.Join(dir, "kv"))
	check(b, err)
	b.Cleanup(func() { _ = file.Close() })
	check(b, file.Truncate(floodSpan))
	_, err = node.Register("file", driver.Segment{Kind: driver.File, Len: floodSpan,
		FD: int(file.Fd())})
	check(b, err)
	local := register(b, node, "local", floodSpan)
	self, err := node.Self()
	check(b, err)
	f := (&flooded{}).fill(b, self, Read, Write, local, remote(b, self, "file"))
	check(b, put(self, local, remote(b, self, "file"), floodSpan)) // no holes
	return f
}

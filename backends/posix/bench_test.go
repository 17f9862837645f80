// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/backends"
	"github.com/sluicehq/sluice/backends/backendtest"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// The benchmarks run beside fio, over the same file, with requests of the same size and as
// many at once, in turn; they report medians.
const (
	benchBytes = 4 << 30
	benchSlice = 700 * time.Millisecond
)

// figure is what one way has done in one slice.
type figure struct {
	rate float64 // requests a second
	cpu  float64 // nanoseconds of processor time a request, user and system
}

func BenchmarkFile(b *testing.B) {
	path := benchFile(b)
	for _, s := range []struct {
		n     uint64
		depth int
	}{{1 << 20, 8}, {64 << 10, 32}, {4 << 10, 32}, {4 << 10, 1}} {
		for _, op := range []backends.Op{backends.Read, backends.Write} {
			b.Run(fmt.Sprintf("%v/size=%d/depth=%d", op, s.n, s.depth), func(b *testing.B) {
				benchBeside(b, path, op, s.n, s.depth)
			})
		}
	}
	b.Run("read/pages/2048x656", func(b *testing.B) { benchScattered(b, path) })
}

// benchFile writes all of a file, so that its blocks are there.
func benchFile(b *testing.B) string {
	path := filepath.Join(b.TempDir(), "bench")
	f, err := os.Create(path)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	block := make([]byte, 8<<20)
	for i := range block {
		block[i] = byte(i * 7)
	}
	for off := int64(0); off < benchBytes; off += int64(len(block)) {
		if _, err := f.WriteAt(block, off); err != nil {
			b.Fatal(err)
		}
	}
	if err := errors.Join(f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)); err != nil {
		b.Fatal(err)
	}
	return path
}

// rig is a backend with host memory and a file, connected to itself.
type rig struct {
	b             *Backend
	p             backends.Peer
	mem           []byte
	local, remote uint32
	done          [64]backends.Completion
	poll          [1]unix.PollFd
}

func newRig(tb testing.TB, cfg Config, file backends.Segment, bytes uint64) *rig {
	tb.Helper()
	b, err := New(cfg)
	if err != nil {
		backendtest.SkipIfUnavailable(tb, err)
	}
	buf, err := hostmem.Alloc(bytes, hostmem.Options{Purpose: "test", Populate: true})
	if err != nil {
		tb.Fatal(err)
	}
	r := &rig{b: b, mem: buf.Segment().Mem}
	tb.Cleanup(func() {
		if err := errors.Join(b.Close(), buf.Close()); err != nil {
			tb.Error(err)
		}
	})
	l, err := b.Register(buf.Segment())
	if err != nil {
		tb.Fatal(err)
	}
	m, err := b.Register(file)
	if err != nil {
		tb.Fatal(err)
	}
	if r.p, err = b.Connect(context.Background(), b.Addr()); err != nil {
		tb.Fatal(err)
	}
	token, err := m.AppendToken(nil)
	if err != nil {
		tb.Fatal(err)
	}
	r.local = l.Key()
	if r.remote, _, err = r.p.Import(token); err != nil {
		tb.Fatal(err)
	}
	return r
}

// sleep parks until something is there, as the engine does.
func (r *rig) sleep() error {
	ready, err := r.b.Arm()
	if ready || err != nil {
		return err
	}
	r.poll[0] = unix.PollFd{Fd: int32(r.b.FD()), Events: unix.POLLIN}
	if _, err := unix.Poll(r.poll[:], -1); err != nil && err != unix.EINTR {
		return err
	}
	var drained [8]byte
	_, _ = unix.Read(r.b.FD(), drained[:])
	return nil
}

// measure keeps depth single requests under way, at random places.
func (r *rig) measure(op backends.Op, n uint64, depth int, slice time.Duration) (figure, error) {
	places := uint64(benchBytes) / n
	submit := func(slot uint64) error {
		d := [1]backends.Desc{{Local: slot * n, Remote: rand.Uint64N(places) * n, Len: n, LocalKey: r.local, RemoteKey: r.remote}}
		return r.p.Submit(op, slot, d[:])
	}
	begin, used := time.Now(), processTime()
	for slot := range uint64(depth) {
		if err := submit(slot); err != nil {
			return figure{}, err
		}
	}
	ops, flying, ending := 0, depth, false
	for flying > 0 {
		k, err := r.b.Poll(r.done[:])
		if err != nil {
			return figure{}, err
		}
		ending = ending || time.Since(begin) > slice
		for _, c := range r.done[:k] {
			if c.Err != nil {
				return figure{}, c.Err
			}
			if ops++; ending {
				flying--
			} else if err := submit(c.Tag); err != nil {
				return figure{}, err
			}
		}
		if k == 0 {
			if err := r.sleep(); err != nil {
				return figure{}, err
			}
		}
	}
	return figureOf(ops, time.Since(begin), processTime()-used), nil
}

func figureOf(ops int, took, used time.Duration) figure {
	return figure{float64(ops) / took.Seconds(), float64(used.Nanoseconds()) / float64(ops)}
}

// processTime is what this process and its threads of the kernel have used.
func processTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func benchBeside(b *testing.B, path string, op backends.Op, n uint64, depth int) {
	f, err := Open(path, OpenOptions{})
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	ring := newRig(b, Config{Path: PathRing}, f.Segment(), n*uint64(depth))
	threads := newRig(b, Config{Path: PathThreads}, f.Segment(), n*uint64(depth))
	var ours, theirs, pooled []figure
	for b.Loop() {
		for _, way := range []struct {
			run  func() (figure, error)
			into *[]figure
		}{
			{func() (figure, error) { return ring.measure(op, n, depth, benchSlice) }, &ours},
			{func() (figure, error) { return fio(path, op, n, depth) }, &theirs},
			{func() (figure, error) { return threads.measure(op, n, depth, benchSlice) }, &pooled},
		} {
			got, err := way.run()
			if err != nil {
				b.Fatal(err)
			}
			*way.into = append(*way.into, got)
		}
	}
	report(b, n, ours, "fio", theirs)
	report(b, n, pooled, "", nil)
}

// report prints medians, and the ratio to what stands beside.
func report(b *testing.B, n uint64, ours []figure, beside string, theirs []figure) {
	rate, cpu := medians(ours)
	prefix := ""
	if beside == "" {
		prefix = "threads-"
	}
	b.ReportMetric(rate*float64(n)/1e6, prefix+"MB/s")
	b.ReportMetric(cpu, prefix+"cpu-ns")
	if beside == "" {
		return
	}
	b.ReportMetric(1e9/rate, "ns/op")
	other, otherCPU := medians(theirs)
	b.ReportMetric(other*float64(n)/1e6, beside+"-MB/s")
	b.ReportMetric(otherCPU, beside+"-cpu-ns")
	b.ReportMetric(rate/other, "x-"+beside)
}

func medians(list []figure) (rate, cpu float64) {
	var rates, cpus []float64
	for _, f := range list {
		rates, cpus = append(rates, f.rate), append(cpus, f.cpu)
	}
	slices.Sort(rates)
	slices.Sort(cpus)
	return rates[len(rates)/2], cpus[len(cpus)/2]
}

// fio runs the same shape with fio's io_uring, with buffers and files registered.
func fio(path string, op backends.Op, n uint64, depth int) (figure, error) {
	tool, err := exec.LookPath("fio")
	if err != nil {
		return figure{}, fmt.Errorf("%w: hack/setup.sh installs it", err)
	}
	out, err := exec.Command(tool, "--name=beside", "--filename="+path, "--rw=rand"+op.String(), fmt.Sprint("--bs=", n),
		fmt.Sprint("--iodepth=", depth), fmt.Sprint("--size=", int64(benchBytes)), "--ioengine=io_uring", "--direct=1", "--fixedbufs=1",
		"--registerfiles=1", "--norandommap", "--time_based", "--runtime=1", "--output-format=json").Output()
	if err != nil {
		return figure{}, fmt.Errorf("fio: %w", err)
	}
	type side struct {
		IOs     float64 `json:"total_ios"`
		Runtime float64 `json:"runtime"` // ms
	}
	var r struct {
		Jobs []struct {
			Read   side    `json:"read"`
			Write  side    `json:"write"`
			User   float64 `json:"usr_cpu"` // percent
			System float64 `json:"sys_cpu"`
		} `json:"jobs"`
	}
	if err := json.Unmarshal(out, &r); err != nil || len(r.Jobs) != 1 {
		return figure{}, fmt.Errorf("fio printed %.200q: %w", out, err)
	}
	j := r.Jobs[0]
	s := j.Read
	if op == backends.Write {
		s = j.Write
	}
	cpu := (j.User + j.System) / 100 * s.Runtime * 1e6 / s.IOs
	return figure{s.IOs / s.Runtime * 1e3, cpu}, nil
}

const entryLen, entries = 656, 2048

// benchScattered reads entries from all over the file, as one batch, beside 32 threads that
// call pread. Nothing of the file is in the page cache at first.
func benchScattered(b *testing.B, path string) {
	f, err := Open(path, OpenOptions{ReadOnly: true})
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	ring := newRig(b, Config{Path: PathRing}, f.Segment(), entryLen*entries)
	places := make([]uint32, entries)
	var ours, theirs []figure
	for b.Loop() {
		for range 3 {
			for i := range places {
				places[i] = rand.Uint32N(benchBytes/entryLen - 1)
			}
			got, err := ring.gather(places)
			if err != nil {
				b.Fatal(err)
			}
			ours = append(ours, got)
			if err := unix.Fadvise(f.Segment().FD, 0, 0, unix.FADV_DONTNEED); err != nil {
				b.Fatal(err)
			}
			if got, err = preads(f.Segment().FD, places, ring.mem, 32); err != nil {
				b.Fatal(err)
			}
			theirs = append(theirs, got)
		}
	}
	report(b, entryLen*entries, ours, "32-preads", theirs)
}

func (r *rig) gather(places []uint32) (figure, error) {
	g := backends.Pages{Count: entries, EntryLen: entryLen, LocalStride: entryLen, RemoteStride: entryLen,
		Remote: places, LocalKey: r.local, RemoteKey: r.remote}
	begin, used := time.Now(), processTime()
	if err := r.p.(backends.Pager).SubmitPages(backends.Read, 1, &g, nil); err != nil {
		return figure{}, err
	}
	for {
		k, err := r.b.Poll(r.done[:])
		switch {
		case err != nil:
			return figure{}, err
		case k == 1:
			return figureOf(1, time.Since(begin), processTime()-used), r.done[0].Err
		}
		if err := r.sleep(); err != nil {
			return figure{}, err
		}
	}
}

// preads reads the entries with a loop in each of so many threads.
func preads(fd int, places []uint32, mem []byte, threads int) (figure, error) {
	begin, used := time.Now(), processTime()
	errs := make([]error, threads)
	var all sync.WaitGroup
	for t := range threads {
		all.Go(func() {
			for i := t; i < len(places); i += threads {
				if _, err := unix.Pread(fd, mem[i*entryLen:][:entryLen], int64(places[i])*entryLen); err != nil {
					errs[t] = err
				}
			}
		})
	}
	all.Wait()
	return figureOf(1, time.Since(begin), processTime()-used), errors.Join(errs...)
}

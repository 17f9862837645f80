// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/backends/posix"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// diskEnd is a posix backend, connected to itself, with a file and host memory.
type diskEnd struct {
	closers
	b             *posix.Backend
	p             driver.Peer
	mem           []byte
	local, remote uint32
	begun         []time.Time // of each request
	lats          *Samples
	done          [64]driver.Completion
	desc          [1]driver.Desc
	batch         driver.Batch
	pattern       driver.Pattern
	poll          [1]unix.PollFd
	places        []uint32
}

func openDiskEnd(cfg posix.Config, f *posix.File, s *Shape) (_ *diskEnd, err error) {
	e := &diskEnd{begun: make([]time.Time, s.Batch), lats: NewSamples(samplesMax),
		places: make([]uint32, s.Batch)}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.close())
		}
	}()
	buf, err := hostmem.Alloc(s.Size*uint64(s.Batch), hostmem.Options{Purpose: "bench",
		Populate: true})
	if err != nil {
		return nil, err
	}
	e.closers, e.mem = append(e.closers, buf), buf.Segment().Mem
	if e.b, err = posix.New(cfg); err != nil {
		return nil, err
	}
	e.closers = append(e.closers, e.b)
	l, err := e.b.Register(buf.Segment())
	if err != nil {
		return nil, err
	}
	m, err := e.b.Register(f.Segment())
	if err != nil {
		return nil, err
	}
	if e.p, err = e.b.Connect(context.Background(), e.b.Addr()); err != nil {
		return nil, err
	}
	token, err := m.AppendToken(nil)
	if err != nil {
		return nil, err
	}
	e.local = l.Key()
	e.remote, _, err = e.p.Import(token)
	return e, err
}

func (e *diskEnd) close() error {
	if e == nil {
		return nil
	}
	return e.closers.close()
}

func (e *diskEnd) explain() string {
	return e.p.Explain(e.local, e.remote)
}

// sleep parks until something is there, as the engine does.
func (e *diskEnd) sleep() error {
	ready, err := e.b.Arm()
	if ready || err != nil {
		return err
	}
	e.poll[0] = unix.PollFd{Fd: int32(e.b.FD()), Events: unix.POLLIN}
	if _, err := unix.Poll(e.poll[:], -1); err != nil && err != unix.EINTR {
		return err
	}
	var drained [8]byte
	_, _ = unix.Read(e.b.FD(), drained[:]) // nothing is there after EINTR
	return nil
}

// requests keeps a batch of single requests under way for the time of a slice.
func (e *diskEnd) requests(s *Shape, slice time.Duration) (diskFigure, error) {
	places := s.Spread / s.Size
	submit := func(slot uint64) error {
		e.desc[0] = driver.Desc{Local: slot * s.Size, Remote: rand.Uint64N(places) * s.Size,
			Len:      s.Size,
			LocalKey: e.local, RemoteKey: e.remote}
		e.begun[slot] = time.Now()
		e.batch = driver.Batch{Op: s.Op, Descs: e.desc[:]}
		return e.p.Submit(slot, &e.batch)
	}
	e.lats.Reset()
	begin, used := time.Now(), processTime()
	for slot := range uint64(s.Batch) {
		if err := submit(slot); err != nil {
			return diskFigure{}, err
		}
	}
	ops := 0
	for flying := s.Batch; flying > 0; {
		n, err := e.b.Poll(e.done[:])
		now := time.Now()
		for _, c := range e.done[:n] {
			err = errors.Join(err, c.Err)
			e.lats.Add(now.Sub(e.begun[c.Tag]))
			ops++
			if now.Sub(begin) > slice {
				flying--
			} else {
				err = errors.Join(err, submit(c.Tag))
			}
		}
		if err == nil && n == 0 {
			err = e.sleep()
		}
		if err != nil {
			return diskFigure{}, err
		}
	}
	f := figureOf(ops, time.Since(begin), processTime()-used, e.lats.Percentile(50))
	f.p99 = e.lats.Percentile(99)
	return f, nil
}

func figureOf(ops int, took, used, p50 time.Duration) diskFigure {
	return diskFigure{rate: float64(ops) / took.Seconds(), cpu: used / time.Duration(ops), p50: p50,
		p99: p50}
}

// counted adds to a figure what was allocated for each request.
func counted(run func() (diskFigure, error), slice time.Duration) (diskFigure, error) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f, err := run()
	runtime.ReadMemStats(&after)
	f.allocs = float64(after.Mallocs-before.Mallocs) / max(1, f.rate*slice.Seconds())
	return f, err
}

// draw takes new places.
func (e *diskEnd) draw(s *Shape) {
	if s.Dense > 0 {
		room := s.Spread/s.Size - uint64(s.Dense*s.Batch) + 1
		base := uint32(rand.Uint64N(room))
		for i := range e.places {
			e.places[i] = base + uint32(i*s.Dense) + rand.Uint32N(uint32(s.Dense))
		}
		rand.Shuffle(len(e.places), func(i, j int) {
			e.places[i], e.places[j] = e.places[j], e.places[i]
		})
		return
	}
	for i := range e.places {
		e.places[i] = rand.Uint32N(uint32(s.Spread / s.Size))
	}
}

// persist writes batches, one after the other, each of which ends once the disk has it.
func (e *diskEnd) persist(s *Shape, slice time.Duration) (diskFigure, error) {
	descs := make([]driver.Desc, s.Batch)
	e.lats.Reset()
	ops := 0
	begin, used := time.Now(), processTime()
	for time.Since(begin) < slice {
		for i := range descs {
			descs[i] = driver.Desc{Local: uint64(i) * s.Size,
				Remote: rand.Uint64N(s.Spread/s.Size) * s.Size, Len: s.Size,
				LocalKey: e.local, RemoteKey: e.remote}
		}
		start := time.Now()
		e.batch = driver.Batch{Op: driver.Write, Durable: true, Descs: descs}
		if err := e.p.Submit(0, &e.batch); err != nil {
			return diskFigure{}, err
		}
		if err := e.finish(); err != nil {
			return diskFigure{}, err
		}
		e.lats.Add(time.Since(start))
		ops += s.Batch
	}
	f := figureOf(ops, time.Since(begin), processTime()-used, e.lats.Percentile(50))
	f.p99 = e.lats.Percentile(99)
	return f, nil
}

// finish waits for the only batch that is under way.
func (e *diskEnd) finish() error {
	for {
		n, err := e.b.Poll(e.done[:1])
		if n == 1 {
			return e.done[0].Err
		}
		if err == nil {
			err = e.sleep()
		}
		if err != nil {
			return err
		}
	}
}

// gather moves entries at random places as one transfer.
func (e *diskEnd) gather(s *Shape) (diskFigure, error) {
	e.draw(s)
	e.pattern = driver.Pattern{Count: s.Batch, Run: s.Size, Local: driver.Side{Stride: s.Size},
		Remote:   driver.Side{Stride: s.Size, List: e.places},
		LocalKey: e.local, RemoteKey: e.remote}
	e.batch = driver.Batch{Op: s.Op, Pattern: &e.pattern}
	begin, used := time.Now(), processTime()
	if err := e.p.Submit(0, &e.batch); err != nil {
		return diskFigure{}, err
	}
	if err := e.finish(); err != nil {
		return diskFigure{}, err
	}
	took := time.Since(begin)
	return figureOf(1, took, processTime()-used, took), nil
}

// preads reads as many entries with a loop of pread in each thread.
func preads(fd int, e *diskEnd, s *Shape) (diskFigure, error) {
	if s.Op != driver.Read {
		return diskFigure{}, fmt.Errorf("pread beside %v: %w", s.Op, ErrShape)
	}
	e.draw(s)
	if err := unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED); err != nil {
		return diskFigure{}, err
	}
	begin, used := time.Now(), processTime()
	var errs [preadThreads]error
	var all sync.WaitGroup
	for t := range preadThreads {
		all.Go(func() {
			for i := t; i < s.Batch && errs[t] == nil; i += preadThreads {
				_, errs[t] = unix.Pread(fd, e.mem[uint64(i)*s.Size:][:s.Size],
					int64(uint64(e.places[i])*s.Size))
			}
		})
	}
	all.Wait()
	took := time.Since(begin)
	return figureOf(1, took, processTime()-used, took), errors.Join(errs[:]...)
}

// processTime is the processor time of this process and of what the kernel's threads of it
// have used.
func processTime() time.Duration {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u) // cannot fail
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

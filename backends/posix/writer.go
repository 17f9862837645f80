// SPDX-License-Identifier: Apache-2.0

package posix

import "github.com/sluicehq/sluice/internal/files"

// A writer performs the short buffered writes to one regular file, one after the other. Its
// goroutine ends when no request is left.
//
// These writes do not use io_uring. Most filesystems serialize buffered writes to a file and do
// not support them without blocking, so io_uring passes each one to a kernel worker thread. That
// handover costs several times as much as the copy. Each file has its own writer, so a disk that
// does not answer delays only its own files.
type writer struct {
	g     *ring
	run   func()                       // s.write, bound once: starting it does not allocate
	batch [files.ReapMax]files.Landing // the requests that the goroutine works on

	// Guarded by Core.Mu.
	todo  []*files.Request // at most Config.Depth
	awake bool             // the goroutine runs, or is in ring.toStart
}

// writerBytes is how many bytes a writer writes before it reports them as done.
const writerBytes = 256 << 10

// newWriter makes the writer of a file. Put calls it at the first short buffered write, since most
// files have none.
func (g *ring) newWriter() *writer {
	s := &writer{g: g, todo: make([]*files.Request, 0, g.cfg.Depth)}
	s.run = s.write
	return s
}

// writerFile returns the file of r if the file's writer must do r, and nil if io_uring must.
func writerFile(r *files.Request) *ringFile {
	if r.Kind == files.Write && !r.Direct && r.N <= inlineMax {
		if f := r.File.Own.(*ringFile); f.hasWriter {
			return f
		}
	}
	return nil
}

// add queues a request. If the writer's goroutine does not run, the next Kick starts it.
//
// Preconditions: core.Mu is held.
func (s *writer) add(r *files.Request) {
	s.todo = append(s.todo, r)
	if !s.awake {
		s.awake = true
		s.g.writers.Add(1)
		s.g.toStart = append(s.g.toStart, s)
		s.g.startDue.Store(true)
	}
}

// startWriters starts the goroutines of the writers in g.toStart.
func (g *ring) startWriters() {
	for s := g.nextToStart(); s != nil; s = g.nextToStart() {
		go s.run()
	}
}

func (g *ring) nextToStart() *writer {
	g.core.Mu.Lock()
	defer g.core.Mu.Unlock()
	n := len(g.toStart)
	if n == 0 {
		g.startDue.Store(false)
		return nil
	}
	s := g.toStart[n-1]
	g.toStart[n-1] = nil
	g.toStart = g.toStart[:n-1]
	return s
}

// write is the writer's goroutine. It also calls Serve for the requests that it has done, so they
// complete without a call of Poll.
func (s *writer) write() {
	defer s.g.writers.Done()
	for n := s.takeBatch(); n > 0; n = s.takeBatch() {
		for i := range s.batch[:n] {
			s.batch[i] = run(s.batch[i].R)
		}
		s.g.deliver(s.batch[:n])
		for s.g.landedCount.Load() > 0 {
			s.g.core.Serve()
		}
	}
}

// takeBatch moves the next requests from todo to batch and returns how many it moved.
func (s *writer) takeBatch() (n int) {
	s.g.core.Mu.Lock()
	defer s.g.core.Mu.Unlock()
	for bytes := uint64(0); n < len(s.todo) && n < len(s.batch) && bytes < writerBytes; n++ {
		s.batch[n].R = s.todo[n]
		bytes += s.todo[n].N
	}
	rest := copy(s.todo, s.todo[n:])
	clear(s.todo[rest:])
	s.todo = s.todo[:rest]
	s.awake = n > 0
	return n
}

// deliver queues finished writes for the next Reap.
func (g *ring) deliver(list []files.Landing) {
	g.core.Mu.Lock()
	defer g.core.Mu.Unlock()
	g.landed = append(g.landed, list...)
	g.landedCount.Store(int32(len(g.landed)))
	clear(list)
}

// reapWritten is the part of Reap that takes the finished requests of the writers.
func (g *ring) reapWritten(out []files.Landing) int {
	n := takeFirst(out, &g.landed)
	g.landedCount.Store(int32(len(g.landed)))
	return n
}

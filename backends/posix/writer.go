// SPDX-License-Identifier: Apache-2.0

package posix

import "github.com/sluicehq/sluice/internal/files"

// writer does the short writes to one regular file that go through the page cache, one after the
// other, in a goroutine that lives while there are some. Most filesystems take such writes one at a
// time and let none begin that might wait, so io_uring has a thread of the kernel do each of them,
// and to hand it over costs several times what the copy does. A file whose disk does not answer
// holds up no other.
type writer struct {
	g    *ring
	run  func() // write, made once: to start it allocates nothing
	hand [files.ReapMax]files.Landing

	// Guarded by Core.Mu.
	todo  []*files.Request // at most Config.Depth
	awake bool
}

// writerBytes is how many bytes a writer writes before it says so.
const writerBytes = 256 << 10

// newWriter makes the writer of a file: at its first short write, since most files have none.
func (g *ring) newWriter() *writer {
	s := &writer{g: g, todo: make([]*files.Request, 0, g.cfg.Depth)}
	s.run = s.write
	return s
}

// writes returns the file of a request that is for its writer, nil for io_uring.
func writes(r *files.Request) *ringFile {
	if r.Kind == files.Write && !r.Past && r.N <= inlineMax {
		if f := r.File.Own.(*ringFile); f.writes {
			return f
		}
	}
	return nil
}

// add hands over a request. The next Kick starts the goroutine.
//
// Preconditions: core.Mu is held.
func (s *writer) add(r *files.Request) {
	s.todo = append(s.todo, r)
	if !s.awake {
		s.awake = true
		s.g.writers.Add(1)
		s.g.rising = append(s.g.rising, s)
		s.g.risen.Store(true)
	}
}

// raise starts the goroutines of writers that have something to do.
func (g *ring) raise() {
	for s := g.nextRising(); s != nil; s = g.nextRising() {
		go s.run()
	}
}

func (g *ring) nextRising() *writer {
	g.core.Mu.Lock()
	defer g.core.Mu.Unlock()
	n := len(g.rising)
	if n == 0 {
		g.risen.Store(false)
		return nil
	}
	s := g.rising[n-1]
	g.rising[n-1] = nil
	g.rising = g.rising[:n-1]
	return s
}

// write works until there is nothing to do. What it has written it also serves: no caller need
// poll.
func (s *writer) write() {
	defer s.g.writers.Done()
	for n := s.take(); n > 0; n = s.take() {
		for i := range s.hand[:n] {
			s.hand[i] = run(s.hand[i].R)
		}
		s.g.deliver(s.hand[:n])
		for s.g.written.Load() > 0 {
			s.g.core.Serve()
		}
	}
}

// take takes some requests in hand, and returns how many.
func (s *writer) take() (n int) {
	s.g.core.Mu.Lock()
	defer s.g.core.Mu.Unlock()
	for bytes := uint64(0); n < len(s.todo) && n < len(s.hand) && bytes < writerBytes; n++ {
		s.hand[n].R = s.todo[n]
		bytes += s.todo[n].N
	}
	rest := copy(s.todo, s.todo[n:])
	clear(s.todo[rest:])
	s.todo = s.todo[:rest]
	s.awake = n > 0
	return n
}

// deliver has what was written be reaped.
func (g *ring) deliver(list []files.Landing) {
	g.core.Mu.Lock()
	defer g.core.Mu.Unlock()
	g.landed = append(g.landed, list...)
	g.written.Store(int32(len(g.landed)))
	clear(list)
}

// reapWritten is Reap for what writers have done.
func (g *ring) reapWritten(out []files.Landing) int {
	n := takeFirst(out, &g.landed)
	g.written.Store(int32(len(g.landed)))
	return n
}

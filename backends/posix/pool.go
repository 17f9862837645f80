// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// pool is the path without io_uring: threads that wait in preadv and pwritev.
type pool struct {
	b       *Backend
	work    chan *request
	threads sync.WaitGroup

	count  atomic.Int32 // of landed
	mu     sync.Mutex   // after flights.Mu
	landed []landing
}

func openPool(b *Backend) *pool {
	p := &pool{b: b, work: make(chan *request, b.cfg.Depth), landed: make([]landing, 0,
		b.cfg.Depth)}
	for range b.cfg.Threads {
		p.threads.Go(p.serve)
	}
	return p
}

func (p *pool) serve() {
	for r := range p.work {
		res := r.run()
		p.mu.Lock()
		p.landed = append(p.landed, landing{r, res})
		p.count.Add(1)
		p.mu.Unlock()
		p.b.serve()
	}
}

// run does what is asked for, as one system call.
func (r *request) run() int {
	if r.ending.Load() {
		return -int(syscall.ECANCELED)
	}
	switch r.kind {
	case readInto:
		return vectored(unix.SYS_PREADV, r.fd(), r.iov, r.off+r.done)
	case writeFrom:
		return vectored(unix.SYS_PWRITEV, r.fd(), r.iov, r.off+r.done)
	}
	if err := unix.Fdatasync(r.fd()); err != nil {
		if errno, ok := err.(syscall.Errno); ok {
			return -int(errno)
		}
		return -int(syscall.EIO)
	}
	return 0
}

// put implements mover: there are as many places as requests.
func (p *pool) put(r *request) { p.work <- r }

// cancel implements mover: what a thread has not begun it does not begin.
func (p *pool) cancel(*request) {}

// reap implements mover.
func (p *pool) reap(out []landing) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := copy(out, p.landed)
	rest := copy(p.landed, p.landed[n:])
	clear(p.landed[rest:])
	p.landed = p.landed[:rest]
	p.count.Add(int32(-n))
	return n
}

// pending implements mover.
func (p *pool) pending() bool { return p.count.Load() > 0 }

// The rest of mover: the threads look after what they have done by themselves, and know
// neither files nor buffers.
func (p *pool) listen(_, _ bool)     {}
func (p *pool) tells() bool          { return false }
func (p *pool) kick()                {}
func (p *pool) fixedBuffers() int32  { return -1 }
func (p *pool) addFile(*file) error  { return nil }
func (p *pool) dropFile(*file) error { return nil }
func (p *pool) pin([]byte) pin       { return pin{} }
func (p *pool) unpin(*pin) error     { return nil }

// close implements mover.
func (p *pool) close() error {
	close(p.work)
	p.threads.Wait()
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/files"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// pool does the requests without io_uring: its threads block in preadv and pwritev, and call Serve
// for each request that they have done. It registers neither files nor memory.
type pool struct {
	core    *files.Core
	cfg     *Config
	choice  string // "8 threads (why not io_uring)", for Choice and Explain
	work    chan *files.Request
	threads sync.WaitGroup
	armed   atomic.Bool // Arm was called: the program sleeps until the next Wake

	count  atomic.Int32    // len(landed), for Pending, which does not lock
	mu     sync.Mutex      // guards landed; taken after Core.Mu
	landed []files.Landing // results of finished requests that Reap has not returned yet
}

func openPool(core *files.Core, cfg *Config, why string) *pool {
	p := &pool{core: core, cfg: cfg, choice: fmt.Sprintf("%d threads (%s)", cfg.Threads, why),
		work:   make(chan *files.Request, cfg.Depth),
		landed: make([]files.Landing, 0, cfg.Depth)}
	for range cfg.Threads {
		p.threads.Go(p.serve)
	}
	return p
}

func (p *pool) serve() {
	for r := range p.work {
		l := run(r)
		p.mu.Lock()
		p.landed = append(p.landed, l)
		p.count.Add(1)
		p.mu.Unlock()
		p.core.Serve()
	}
}

// run does a request in one system call, a scattered one in one for each place. It does not
// allocate.
func run(r *files.Request) files.Landing {
	l := files.Landing{R: r}
	for i := range r.Offs {
		if r.Ending.Load() {
			break
		}
		v := r.Places[i]
		n, _, errno := unix.Syscall6(unix.SYS_PWRITE64, uintptr(r.FD()), uintptr(v.At),
			uintptr(v.Len), uintptr(r.Offs[i]), 0, 0)
		if errno != 0 {
			if l.N == 0 { // else the next attempt meets it
				l.Err = errno
			}
			return l
		}
		if l.N += int(n); uint64(n) < v.Len {
			return l
		}
		testpoint.At("posix: piece written")
	}
	if l.N > 0 {
		return l
	}
	if r.Ending.Load() {
		l.Err = syscall.ECANCELED
		return l
	}
	call := uintptr(unix.SYS_PREADV)
	switch r.Kind {
	case files.Write:
		call = unix.SYS_PWRITEV
	case files.Sync:
		l.Err = unix.Fdatasync(r.FD())
		return l
	}
	n, _, errno := unix.Syscall6(call, uintptr(r.FD()), files.Pointer(r.Places),
		uintptr(len(r.Places)), uintptr(r.Off+r.Done), 0, 0)
	if errno != 0 {
		l.Err = errno
		return l
	}
	l.N = int(n)
	return l
}

// Put implements files.Mover. It does not block: the channel has room for the whole table.
func (p *pool) Put(r *files.Request) { p.work <- r }

// Cancel implements files.Mover. It has nothing to do: run reads Request.Ending and does not begin
// a cancelled request.
func (p *pool) Cancel(*files.Request) {}

// Reap implements files.Mover.
func (p *pool) Reap(out []files.Landing) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := takeFirst(out, &p.landed)
	p.count.Add(int32(-n))
	return n
}

// takeFirst moves as many elements from the front of list as out has room for.
func takeFirst(out []files.Landing, list *[]files.Landing) int {
	n := copy(out, *list)
	rest := copy(*list, (*list)[n:])
	clear((*list)[rest:])
	*list = (*list)[:rest]
	return n
}

// Pending implements files.Mover.
func (p *pool) Pending() bool { return p.count.Load() > 0 }

// Arm implements files.Mover.
func (p *pool) Arm() (pending bool) {
	p.armed.Store(true)
	return p.Pending()
}

// Wake implements files.Mover.
func (p *pool) Wake() { wake(p.core, &p.armed) }

func wake(core *files.Core, armed *atomic.Bool) {
	if armed.Load() && armed.CompareAndSwap(true, false) {
		_ = core.Event.Signal() // fails only when closed: nothing sleeps any more
	}
}

// Listen implements files.Mover.
func (p *pool) Listen(bool) {}

// Kick implements files.Mover.
func (p *pool) Kick() {}

// AddFile implements files.Mover.
func (p *pool) AddFile(*files.File) error { return nil }

// DropFile implements files.Mover.
func (p *pool) DropFile(*files.File) error { return nil }

// AddMemory implements files.Mover.
func (p *pool) AddMemory(*files.Memory, *driver.Segment) error { return nil }

// DropMemory implements files.Mover.
func (p *pool) DropMemory(*files.Memory) error { return nil }

// Explain implements files.Mover.
func (p *pool) Explain(_, remote *files.Memory) string { return explain(p.choice, p.cfg, remote) }

// Close implements files.Mover.
func (p *pool) Close() error {
	close(p.work)
	p.threads.Wait()
	return nil
}

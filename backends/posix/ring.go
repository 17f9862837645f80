// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/files"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// ring is io_uring. Any goroutine submits, so the ring is not bound to one thread
// (SINGLE_ISSUER and what needs it): to hand each batch to such a thread would cost more than
// it saves. Nor does it defer the kernel's part to the next call (COOP_TASKRUN): a
// goroutine that computes may make none for long.
//
// A caller that has armed sleeps on an eventfd that the kernel itself writes, only while it is
// wanted (Listen). Where more is to be begun than the table holds, or a caller waits for an end,
// one goroutine, the keeper, waits in the kernel for completions. A caller that polls needs
// neither. Short writes through the page cache are not the ring's (writer).
type ring struct {
	core *files.Core
	cfg  *Config
	fd   int

	ringsMap, entriesMap []byte

	sq, cq queueMap
	sqes   []sqe
	cqes   []cqe
	tail   uint32 // of the submission queue, as we have filled it

	// Whether a caller sleeps, and by whom it is woken. Guarded by Core.Mu where it is not atomic.
	armed atomic.Bool // it is to be woken, by Wake
	bells bool        // the kernel writes the eventfd at each landing
	told  uint32      // tail of the completion queue at the last Arm
	rung  bool        // since then Wake was left out for a landing that the kernel tells of
	owed  atomic.Bool // Kick is to signal: the kernel may not have, before the bells changed

	// Guarded by Core.Mu.
	files     []int32 // places of the table of files that are free
	hasBounce bool    // io_uring knows the requests' buffers

	// What writers do. Guarded by Core.Mu where it is not atomic.
	flying  int             // requests with the kernel
	landed  []files.Landing // written, not yet reaped
	written atomic.Int32    // of landed
	rising  []*writer       // to be started
	risen   atomic.Bool     // by Kick
	writers sync.WaitGroup

	wanted atomic.Bool   // the keeper is
	token  chan struct{} // ends its sleep
	keeper sync.WaitGroup
}

// queueMap are the words of a queue that the kernel and we share.
type queueMap struct {
	head, tail, flags *atomic.Uint32
	mask              uint32
}

const (
	filesMax  = 1 << 14 // places in the table of files, two for each
	cancelTag = 1 << 32 // in user_data: the end of what asked for a cancel
)

// ringFile is what the ring knows of a file.
type ringFile struct {
	fixed, fixedDirect int32   // places in the table of io_uring; -1: none
	writes             bool    // a writer does short writes through the page cache, not io_uring
	writer             *writer // nil until there is one
}

func openRing(core *files.Core, cfg *Config) (_ *ring, err error) {
	g := &ring{core: core, cfg: cfg, fd: -1, landed: make([]files.Landing, 0, cfg.Depth)}
	defer func() {
		if err != nil {
			_ = g.Close()
		}
	}()
	if err := g.setup(uint32(4 * cfg.Depth)); err != nil { // see Cancel
		return nil, err
	}
	if err := g.probe(); err != nil {
		return nil, err
	}
	if err := g.tryOne(); err != nil {
		return nil, err
	}
	if err := g.registerEvent(core.Event.FD()); err != nil {
		return nil, fmt.Errorf("io_uring_register of an eventfd: %w", err)
	}
	if n := min(filesMax, descriptorsMax()); g.registerFiles(n) == nil {
		for at := n - 1; at >= 0; at-- {
			g.files = append(g.files, int32(at))
		}
	}
	// Without the right to pin memory, and with older kernels, there is no table.
	g.hasBounce = g.registerBufferTable(1) == nil && g.updateBuffer(0, g.core.Bounce()) == nil
	g.cq.ring(false)
	g.token = make(chan struct{}, 1)
	g.keeper.Go(g.keep)
	return g, nil
}

// descriptorsMax bounds the table of files, too.
func descriptorsMax() int {
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) != nil {
		return 0
	}
	return int(min(limit.Cur, filesMax))
}

// keep serves what cannot wait for Poll. While it is wanted something is with the kernel, whose
// end ends its wait there.
func (g *ring) keep() {
	for range g.token {
		for g.wanted.Load() {
			_ = g.enter(0, 1) // EINTR at most: then once more
			for g.Pending() {
				g.core.Serve()
			}
		}
	}
}

// Put implements files.Mover. There is room: cancels leave the places of the whole table free.
func (g *ring) Put(r *files.Request) {
	if f := writes(r); f != nil {
		if f.writer == nil {
			f.writer = g.newWriter()
		}
		f.writer.add(r)
		return
	}
	g.flying++
	e := g.nextEntry()
	e.userData = uint64(r.Slot)
	e.fd = int32(r.FD())
	if r.Kind == files.Sync {
		e.opcode, e.rwFlags = opFsync, fsyncData
		g.publish()
		return
	}
	f := r.File.Own.(*ringFile)
	at := f.fixed
	if r.Past {
		at = f.fixedDirect
	}
	if at >= 0 {
		e.fd, e.flags = at, flagFixedFile
	}
	if !r.Past && r.N > inlineMax {
		e.flags |= flagAsync // a thread of the kernel copies, not the submitter
	}
	e.off = r.Off + r.Done
	switch {
	case len(r.Places) > 1:
		e.opcode = [...]uint8{opReadv, opWritev}[r.Kind]
		e.addr, e.len = uint64(files.Pointer(r.Places)), uint32(len(r.Places))
	case r.Bounce && g.hasBounce: // a read
		e.opcode = opReadFixed
		e.addr, e.len = r.Places[0].At, uint32(r.Places[0].Len)
	default:
		e.opcode = [...]uint8{opRead, opWrite}[r.Kind]
		e.addr, e.len = r.Places[0].At, uint32(r.Places[0].Len)
	}
	g.publish()
}

// AddMemory implements files.Mover.
func (g *ring) AddMemory(*files.Memory, *driver.Segment) error { return nil }

// DropMemory implements files.Mover.
func (g *ring) DropMemory(*files.Memory) error { return nil }

// Cancel implements files.Mover. Those that the kernel has not taken yet may outlive their
// requests, so they fill no more of the queue than the requests of the table leave; without room
// the request runs to its end.
func (g *ring) Cancel(r *files.Request) {
	if int(g.tail-g.sq.head.Load()) >= len(g.sqes)-g.cfg.Depth || writes(r) != nil {
		return
	}
	e := g.nextEntry()
	e.opcode, e.fd, e.userData = opAsyncCancel, -1, cancelTag
	e.addr = uint64(r.Slot)
	g.publish()
}

func (g *ring) nextEntry() *sqe {
	e := &g.sqes[g.tail&g.sq.mask]
	*e = sqe{}
	return e
}

func (g *ring) publish() {
	g.tail++
	g.sq.tail.Store(g.tail)
}

// Kick implements files.Mover: one call into the kernel for all that was put, by whomever.
func (g *ring) Kick() {
	if g.risen.Load() {
		g.raise()
	}
	if g.owed.Load() && g.owed.CompareAndSwap(true, false) {
		_ = g.core.Event.Signal()
	}
	for pause := 10 * time.Microsecond; ; pause = min(2*pause, time.Millisecond) {
		n := g.sq.tail.Load() - g.sq.head.Load()
		if n == 0 {
			return
		}
		if errno := g.enter(n, 0); errno != 0 && errno != syscall.EINTR {
			time.Sleep(pause) // the kernel has no memory for requests just now
		}
	}
}

// Pending implements files.Mover.
func (g *ring) Pending() bool {
	return g.cq.tail.Load() != g.cq.head.Load() || g.written.Load() > 0
}

// Reap implements files.Mover. Where the kernel has told the sleeper of what was reaped since it
// armed, or is about to, Wake need not.
func (g *ring) Reap(out []files.Landing) int {
	n := g.reapWritten(out)
	silent := n > 0
	head, tail := g.cq.head.Load(), g.cq.tail.Load()
	for ; head != tail && n < len(out); head++ {
		e := &g.cqes[head&g.cq.mask]
		if e.userData == cancelTag {
			continue
		}
		out[n] = files.Landing{R: g.core.Request(int(e.userData)), N: int(e.res)}
		if e.res < 0 {
			out[n].Err = syscall.Errno(-e.res)
		}
		g.flying--
		n++
	}
	g.cq.head.Store(head)
	if n > 0 && g.bells && !silent && int32(head-g.told) > 0 && g.armed.Load() {
		g.armed.Store(false)
		g.rung = true
	}
	return n
}

// Arm implements files.Mover. The flag goes up before the look. What has landed by now the kernel
// may have told of before the caller last woke.
func (g *ring) Arm() (pending bool) {
	g.core.Mu.Lock()
	g.armed.Store(true)
	g.told = g.cq.tail.Load()
	g.rung = false
	pending = g.Pending()
	g.core.Leave()
	testpoint.At("posix: armed")
	return g.Pending()
}

// Wake implements files.Mover.
func (g *ring) Wake() { wake(g.core, &g.armed) }

// Listen implements files.Mover. The bells stay on until the keeper is wanted, which wakes the
// sleeper when there is something for it.
func (g *ring) Listen(need bool) {
	need = need && g.flying > 0 // writers serve what they have done
	g.wanted.Store(need)
	if need {
		select {
		case g.token <- struct{}{}:
		default:
		}
	}
	switch {
	case need && g.bells:
		g.bells = false
		g.cq.ring(false)
		if g.rung { // the kernel may have seen the flag before it told of what was reaped
			g.rung = false
			g.owed.Store(true)
		}
	case !need && !g.bells && g.armed.Load():
		g.bells = true
		g.cq.ring(true)
		if g.Pending() { // the kernel may have shown it before the flag was there
			g.owed.Store(true)
		}
	}
}

// ring says whether the kernel writes the eventfd. The kernel looks at the flag after it has shown
// a completion, and we look for completions after we have changed the flag: one of the two sees the
// other. Before Linux 5.8 there is no flag, and every completion is told.
func (q *queueMap) ring(bells bool) {
	if q.flags == nil {
		return
	}
	if bells {
		q.flags.Swap(0) // not Store: csrc/ring.Ring says why
	} else {
		q.flags.Swap(eventfdDisabled)
	}
}

// AddFile implements files.Mover. The caller's description of the file must have a place where
// requests go by another: once the process is killed, the kernel holds those of the table until all
// requests have ended, and with the caller's its lock (flock), which says to others that nothing
// lands.
func (g *ring) AddFile(f *files.File) error {
	own := &ringFile{fixed: -1, fixedDirect: -1, writes: !f.IsDevice()} // which io_uring serves
	if f.Swapped {
		if own.fixedDirect = g.addDescriptor(f.Direct); own.fixedDirect < 0 {
			return fmt.Errorf("register a file that is open with O_DIRECT: no place in io_uring's "+
				"table of files: raise RLIMIT_NOFILE, or open it without: %w", driver.ErrFull)
		}
	}
	f.Own = own
	own.fixed = g.addDescriptor(f.FD)
	switch {
	case f.Swapped || f.Direct < 0:
	case own.fixed >= 0:
		own.fixedDirect = g.addDescriptor(f.Direct)
	default:
		return f.DropDirect("no place in io_uring's table of files, without which a lock of the " +
			"file would not outlast the process: raise RLIMIT_NOFILE")
	}
	return nil
}

func (g *ring) addDescriptor(fd int) int32 {
	last := len(g.files) - 1
	if fd < 0 || last < 0 || g.updateFile(int(g.files[last]), fd) != nil {
		return -1
	}
	at := g.files[last]
	g.files = g.files[:last]
	return at
}

// DropFile implements files.Mover.
func (g *ring) DropFile(f *files.File) error {
	own := f.Own.(*ringFile)
	for _, at := range []*int32{&own.fixed, &own.fixedDirect} {
		if *at < 0 {
			continue
		}
		if err := g.updateFile(int(*at), -1); err != nil {
			return err // the kernel has the file open still, and so its lock
		}
		g.files = append(g.files, *at)
		*at = -1
	}
	return nil
}

// Explain implements files.Mover.
func (g *ring) Explain(_, remote *files.Memory) string { return explain("io_uring", g.cfg, remote) }

// Close implements files.Mover. It ends what DropFile and DropMemory could not.
func (g *ring) Close() error {
	var errs []error
	g.writers.Wait()
	if g.token != nil {
		g.wanted.Store(false)
		e := g.nextEntry()
		e.opcode, e.fd, e.userData = opNop, -1, cancelTag // ends the keeper's wait
		g.publish()
		g.Kick()
		close(g.token)
		g.keeper.Wait()
	}
	if g.fd >= 0 {
		errs = append(errs, g.unmap(), unix.Close(g.fd))
	}
	return errors.Join(errs...)
}

func sysErr(call string, errno syscall.Errno) error {
	if errno == 0 {
		return nil
	}
	return os.NewSyscallError(call, errno)
}

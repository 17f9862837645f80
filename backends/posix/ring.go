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

// ring does the requests by io_uring.
//
// Any goroutine submits, so the ring does not use IORING_SETUP_SINGLE_ISSUER or the flags that
// require it: handing each batch to one submitting thread would cost more than it saves. Nor does
// it set IORING_SETUP_COOP_TASKRUN, which defers completions to the next system call of the
// thread: a goroutine that computes may make none for a long time.
//
// The goroutine that waits for the only batch sleeps in the kernel (Sleep) until all of the batch
// has ended. Otherwise a caller that has armed sleeps on an eventfd. The kernel signals it at each
// completion, but only while Listen asks for that. When more requests are ready than the table
// holds, or a caller waits for a request to end, one goroutine, the keeper, waits in the kernel for
// completions. A caller that polls needs neither. A writer (writer.go) does the short writes
// through the page cache.
type ring struct {
	core *files.Core
	cfg  *Config
	fd   int

	ringsMap, entriesMap []byte

	sq, cq queueMap
	sqes   []sqe
	cqes   []cqe
	tail   uint32 // of the submission queue, as we have filled it

	// Whether a caller sleeps, and whether the kernel or Wake wakes it. Core.Mu guards the fields
	// that are not atomic.
	armed atomic.Bool // Wake must wake the caller
	bells bool        // the kernel signals the eventfd at each completion
	told  uint32      // tail of the completion queue at the last Arm
	rung  bool        // since then Reap has skipped a Wake, because the kernel signals
	owed  atomic.Bool // Kick must signal: the kernel may not have, before bells changed

	// Guarded by Core.Mu.
	files     []int32 // free indices of the registered file table
	hasBounce bool    // the requests' bounce buffers are registered with io_uring

	hasTimeout bool          // the kernel can wait for a time: Linux 5.11
	sleepTime  unix.Timespec // sleepMax, for waitArg
	waitArg    waitArg       // of every Sleep

	// Guarded by Core.Mu where it is not atomic.
	flying      int             // requests submitted to io_uring and not yet reaped
	landed      []files.Landing // finished by writers, not yet reaped
	landedCount atomic.Int32    // len(landed), for Pending, which does not lock
	toStart     []*writer       // writers whose goroutine the next Kick starts
	startDue    atomic.Bool     // toStart is not empty
	writers     sync.WaitGroup

	wanted atomic.Bool   // the keeper must wait for completions
	token  chan struct{} // wakes the keeper
	keeper sync.WaitGroup
}

// queueMap holds the indices of a queue that this process shares with the kernel.
type queueMap struct {
	head, tail, flags *atomic.Uint32
	mask              uint32
}

const (
	filesMax  = 1 << 14 // entries of the registered file table, two for each file
	cancelTag = 1 << 32 // in user_data: the completion of a cancel, which Reap ignores
)

// ringFile is the state of a file in the ring.
type ringFile struct {
	fixed, fixedDirect int32   // indices in the registered file table; -1: none
	hasWriter          bool    // a writer does the short buffered writes, not io_uring
	writer             *writer // nil until the first of them
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
	// The kernel refuses the table if the process may not pin memory, or if it is too old.
	g.hasBounce = g.registerBufferTable(1) == nil && g.updateBuffer(0, g.core.Bounce()) == nil
	g.cq.ring(false)
	g.token = make(chan struct{}, 1)
	g.keeper.Go(g.keep)
	return g, nil
}

// descriptorsMax returns RLIMIT_NOFILE, which also limits the registered file table.
func descriptorsMax() int {
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) != nil {
		return 0
	}
	return int(min(limit.Cur, filesMax))
}

// keep is the keeper's goroutine: it completes requests without a call of Poll. While the keeper
// is wanted, io_uring has at least one request, and the end of that request ends the keeper's wait.
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

// Put implements files.Mover. The submission queue has room: Cancel leaves one entry free for each
// request of the table.
func (g *ring) Put(r *files.Request) {
	if f := writerFile(r); f != nil {
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
	if r.Direct {
		at = f.fixedDirect
	}
	if at >= 0 {
		e.fd, e.flags = at, flagFixedFile
	}
	if !r.Direct && r.N > inlineMax {
		e.flags |= flagAsync // a kernel worker thread copies, not the submitting one
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

// Cancel implements files.Mover. A queued cancel may outlive the request that it names. Cancels
// therefore use only the entries of the queue that the requests of the table do not need. If none
// is left, the request is not cancelled and runs to its end.
func (g *ring) Cancel(r *files.Request) {
	if int(g.tail-g.sq.head.Load()) >= len(g.sqes)-g.cfg.Depth || writerFile(r) != nil {
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

// Kick implements files.Mover. One system call submits all queued requests, also those that other
// goroutines have put.
func (g *ring) Kick() {
	g.wakeOthers()
	for pause := 10 * time.Microsecond; ; pause = min(2*pause, time.Millisecond) {
		n := g.sq.tail.Load() - g.sq.head.Load()
		if n == 0 {
			return
		}
		if errno := g.enter(n, 0); errno != 0 && errno != syscall.EINTR {
			time.Sleep(pause) // the kernel is short of memory for requests
		}
	}
}

// wakeOthers starts the writers that have work, and signals the sleeping caller where the kernel
// may not have.
func (g *ring) wakeOthers() {
	if g.startDue.Load() {
		g.startWriters()
	}
	if g.owed.Load() && g.owed.CompareAndSwap(true, false) {
		_ = g.core.Event.Signal()
	}
}

// sleepMax bounds a call of Sleep, so that its caller looks whether it still has to wait. It also
// ends the wait for landings that another goroutine has reaped between Waits and the system call.
const sleepMax = 2 * time.Millisecond

// Waits implements files.Sleeper. It does not count what writers do.
func (g *ring) Waits(n int) int {
	if !g.hasTimeout {
		return 0
	}
	return min(n, g.flying)
}

// Sleep implements files.Sleeper. One system call submits the queued requests and waits.
func (g *ring) Sleep(n int) {
	g.wakeOthers()
	g.enterFor(g.sq.tail.Load()-g.sq.head.Load(), uint32(n))
}

// Pending implements files.Mover.
func (g *ring) Pending() bool {
	return g.cq.tail.Load() != g.cq.head.Load() || g.landedCount.Load() > 0
}

// Reap implements files.Mover. If a reaped completion came after the last Arm, the kernel has
// signalled the sleeping caller or is about to. Reap then disarms: Wake need not signal again.
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

// Arm implements files.Mover. It sets the flag first and looks for completions afterwards, so that
// none is missed between the two. It records the tail of the completion queue, since the kernel may
// have signalled the completions up to there before the caller last woke.
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

// Listen implements files.Mover. The kernel signals the eventfd (bells) until the keeper is wanted
// or a goroutine helps. From then on those wake the sleeping caller.
func (g *ring) Listen(need bool) {
	need = need && g.flying > 0 // writers call Serve themselves
	g.wanted.Store(need)
	if need {
		select {
		case g.token <- struct{}{}:
		default:
		}
	}
	silent := need || g.core.Helped()
	switch {
	case silent && g.bells:
		g.bells = false
		g.cq.ring(false)
		if g.rung { // the kernel may have seen the flag before it signalled what was reaped
			g.rung = false
			g.owed.Store(true)
		}
	case !silent && !g.bells && g.armed.Load():
		g.bells = true
		g.cq.ring(true)
		if g.Pending() { // the kernel may have queued it before it saw the flag
			g.owed.Store(true)
		}
	}
}

// ring sets whether the kernel signals the eventfd. The kernel queues a completion and then reads
// the flag; the caller changes the flag and then looks for completions. So either the kernel sees
// the change or the caller sees the completion. Before Linux 5.8 there is no flag, and the kernel
// signals every completion.
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

// AddFile implements files.Mover.
//
// If the process is killed, the kernel keeps the files of the registered table open until all
// requests have ended. The caller's open file must be in the table even where requests use another
// one: its lock (flock) then lasts as long as the requests, and another process that gets the lock
// knows that nothing more is written.
func (g *ring) AddFile(f *files.File) error {
	own := &ringFile{fixed: -1, fixedDirect: -1, hasWriter: !f.IsDevice()}
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
			return err // the kernel still has the file open, and holds its lock
		}
		g.files = append(g.files, *at)
		*at = -1
	}
	return nil
}

// Explain implements files.Mover.
func (g *ring) Explain(_, remote *files.Memory) string { return explain("io_uring", g.cfg, remote) }

// Close implements files.Mover. Closing the ring also drops the files that DropFile could not.
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

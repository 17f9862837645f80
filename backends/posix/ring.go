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
)

// ring is io_uring. Any goroutine submits, so the ring is not bound to one thread
// (SINGLE_ISSUER and what needs it): to hand each batch to such a thread would cost more than
// it saves. Nor does it defer the kernel's part to the next call (COOP_TASKRUN): a
// goroutine that computes may make none for long.
//
// A caller that has armed sleeps on an eventfd that the kernel itself writes, only while it is
// wanted (listen). Where more is to be begun than the table holds, or a caller waits for an end,
// one goroutine, the keeper, waits in the kernel for completions. A caller that polls needs
// neither. Short writes through the page cache are not the ring's (writer).
type ring struct {
	b  *Backend
	fd int

	ringsMap, entriesMap []byte

	sq, cq queueMap
	sqes   []sqe
	cqes   []cqe
	tail   uint32 // of the submission queue, as we have filled it

	bells bool        // the kernel writes the eventfd; guarded by flights.Mu
	owed  atomic.Bool // kick is to do it: something was there before that was wanted

	files     []int32 // places of the table of files that are free
	buffers   []bool  // those of buffers, but the first, which is the requests'
	hasBounce bool

	// What writers do. Guarded by flights.Mu where it is not atomic.
	flying  int          // requests with the kernel
	landed  []landing    // written, not yet reaped
	written atomic.Int32 // of landed
	rising  []*writer    // to be started
	risen   atomic.Bool  // by kick
	silent  bool         // the kernel did not tell of all that was reaped last
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
	filesMax   = 1 << 14 // places in the table of files, two for each
	buffersMax = 1024    // registered
	bufferMax  = 1 << 30

	cancelTag = 1 << 32 // in user_data: the end of what asked for a cancel
)

// openMover takes what the configuration says, and what the kernel lets us have.
func openMover(b *Backend) (mover, string, error) {
	if b.cfg.Path == PathThreads {
		return openPool(b), fmt.Sprintf("%d threads (Config.Path)", b.cfg.Threads), nil
	}
	g, err := openRing(b)
	switch {
	case err == nil:
		return g, "io_uring", nil
	case b.cfg.Path == PathRing:
		return nil, "", unavailable(err)
	}
	return openPool(b), fmt.Sprintf("%d threads (%v)", b.cfg.Threads, err), nil
}

func openRing(b *Backend) (_ *ring, err error) {
	g := &ring{b: b, fd: -1, landed: make([]landing, 0, b.cfg.Depth)}
	defer func() {
		if err != nil {
			_ = g.close()
		}
	}()
	if err := g.setup(uint32(4 * b.cfg.Depth)); err != nil { // see cancel
		return nil, err
	}
	if err := g.probe(); err != nil {
		return nil, err
	}
	if err := g.tryOne(); err != nil {
		return nil, err
	}
	if err := g.registerEvent(b.event.FD()); err != nil {
		return nil, fmt.Errorf("io_uring_register of an eventfd: %w", err)
	}
	if n := min(filesMax, descriptorsMax()); g.registerFiles(n) == nil {
		for at := n - 1; at >= 0; at-- {
			g.files = append(g.files, int32(at))
		}
	}
	g.registerBounce()
	g.listen(false, false)
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

// registerBounce makes the requests' buffers known, and room for Config.PinMax. Without the
// right to pin memory, and with older kernels, there is none.
func (g *ring) registerBounce() {
	if g.registerBufferTable(buffersMax) == nil {
		g.hasBounce = g.updateBuffer(0, g.b.bounce) == nil
		g.buffers = make([]bool, buffersMax)
		g.buffers[0] = true
	}
}

// keep serves what cannot wait for Poll. While it is wanted something is with the kernel, whose
// end ends its wait there.
func (g *ring) keep() {
	for range g.token {
		for g.wanted.Load() {
			_ = g.enter(0, 1) // EINTR at most: then once more
			for g.pending() {
				g.b.serve()
			}
		}
	}
}

// put implements mover. There is room: cancels leave the places of the whole table free.
func (g *ring) put(r *request) {
	if r.writers() {
		if r.f.writer == nil {
			r.f.writer = g.newWriter()
		}
		r.f.writer.add(r)
		return
	}
	g.flying++
	e := g.nextEntry()
	e.userData = uint64(r.slot)
	e.fd = int32(r.fd())
	if r.kind == syncFile {
		e.opcode, e.rwFlags = opFsync, fsyncData
	} else {
		e.describe(r)
	}
	if at := r.place(); at >= 0 {
		e.fd, e.flags = at, e.flags|flagFixedFile
	}
	g.publish()
}

// place is where io_uring knows the request's descriptor, or -1.
func (r *request) place() int32 {
	switch {
	case r.kind == syncFile:
		return -1
	case r.past:
		return r.f.fixedDirect
	}
	return r.f.fixed
}

// describe fills in a read or a write.
func (e *sqe) describe(r *request) {
	e.off = r.off + r.done
	switch {
	case len(r.iov) > 1:
		e.opcode = [...]uint8{opReadv, opWritev}[r.kind]
		e.point(r.iov)
	case r.fixed >= 0:
		e.opcode, e.bufIndex = [...]uint8{opReadFixed, opWriteFixed}[r.kind], uint16(r.fixed)
		e.pointAt(&r.iov[0])
	default:
		e.opcode = [...]uint8{opRead, opWrite}[r.kind]
		e.pointAt(&r.iov[0])
	}
	if !r.past && r.n > inlineMax {
		e.flags |= flagAsync // a thread of the kernel copies, not the submitter
	}
}

// cancel implements mover. Those that the kernel has not taken yet may outlive their requests, so
// they fill no more of the queue than the requests of the table leave; without room the request
// runs to its end.
func (g *ring) cancel(r *request) {
	if int(g.tail-g.sq.head.Load()) >= len(g.sqes)-g.b.cfg.Depth || r.writers() {
		return
	}
	e := g.nextEntry()
	e.opcode, e.fd, e.userData = opAsyncCancel, -1, cancelTag
	e.addr = uint64(r.slot)
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

// kick implements mover: one call into the kernel for all that was put, by whomever.
func (g *ring) kick() {
	if g.risen.Load() {
		g.raise()
	}
	if g.owed.Load() && g.owed.CompareAndSwap(true, false) {
		g.b.wake()
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

// pending implements mover.
func (g *ring) pending() bool {
	return g.cq.tail.Load() != g.cq.head.Load() || g.written.Load() > 0
}

// reap implements mover.
func (g *ring) reap(out []landing) (n int) {
	n = g.reapWritten(out)
	g.silent = n > 0
	head, tail := g.cq.head.Load(), g.cq.tail.Load()
	for ; head != tail && n < len(out); head++ {
		e := &g.cqes[head&g.cq.mask]
		if e.userData == cancelTag {
			continue
		}
		out[n] = landing{&g.b.requests[e.userData], int(e.res)}
		g.flying--
		n++
	}
	g.cq.head.Store(head)
	return n
}

// listen implements mover. The kernel looks at the flag after it has shown a completion, and
// we look for completions after we have changed the flag: one of the two sees the other.
func (g *ring) listen(need, armed bool) {
	need = need && g.flying > 0 // writers serve what they have done
	g.wanted.Store(need)
	if need {
		select {
		case g.token <- struct{}{}:
		default:
		}
	}
	rang := g.bells
	g.bells = armed && !need // the keeper wakes the sleeper when there is something for it
	if g.cq.flags == nil {
		return // before Linux 5.8 every completion is told
	}
	if !g.bells {
		if rang && g.b.doubt.Load() != 0 {
			g.owed.Store(true) // the kernel may see the flag before it tells of what was reaped
		}
		g.cq.flags.Swap(eventfdDisabled)
		return
	}
	g.cq.flags.Swap(0) // as ring.Ring
	if g.pending() {
		g.owed.Store(true)
	}
}

// tells implements mover.
func (g *ring) tells() bool { return g.bells && !g.silent }

// fixedBuffers implements mover.
func (g *ring) fixedBuffers() int32 {
	if g.hasBounce {
		return 0
	}
	return -1
}

// addFile implements mover. The caller's description of the file must have a place where requests
// go by another: once the process is killed, the kernel holds those of the table until all requests
// have ended, and with the caller's its lock (flock), which says to others that nothing lands.
func (g *ring) addFile(f *file) error {
	if f.swapped {
		if f.fixedDirect = g.addDescriptor(f.direct); f.fixedDirect < 0 {
			return fmt.Errorf("register a file that is open with O_DIRECT: no place in io_uring's "+
				"table of files: raise RLIMIT_NOFILE, or open it without: %w", driver.ErrFull)
		}
	}
	f.fixed = g.addDescriptor(f.fd)
	switch {
	case f.swapped || f.direct < 0:
	case f.fixed >= 0:
		f.fixedDirect = g.addDescriptor(f.direct)
	default:
		f.why = "no place in io_uring's table of files, without which a lock of the file would " +
			"not outlast the process: raise RLIMIT_NOFILE"
		if err := f.dropDirect(); err != nil {
			return err
		}
	}
	f.writes = !f.IsDevice() // which io_uring serves as well
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

// dropFile implements mover.
func (g *ring) dropFile(f *file) error {
	for _, at := range []*int32{&f.fixed, &f.fixedDirect} {
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

// close implements mover.
func (g *ring) close() error {
	var errs []error
	g.writers.Wait()
	if g.token != nil {
		g.wanted.Store(false)
		e := g.nextEntry()
		e.opcode, e.fd, e.userData = opNop, -1, cancelTag // ends the keeper's wait
		g.publish()
		g.kick()
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

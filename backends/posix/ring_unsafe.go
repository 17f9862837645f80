// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The kernel's interface, of include/uapi/linux/io_uring.h.
const (
	opNop         = 0
	opReadv       = 1
	opWritev      = 2
	opFsync       = 3
	opReadFixed   = 4
	opAsyncCancel = 14
	opRead        = 22
	opWrite       = 23

	flagFixedFile = 1 << 0
	flagAsync     = 1 << 4
	fsyncData     = 1 << 0

	enterGetEvents = 1 << 0
	enterExtArg    = 1 << 3

	setupClamp     = 1 << 4
	setupSubmitAll = 1 << 7

	featSingleMmap = 1 << 0
	featNoDrop     = 1 << 1
	featExtArg     = 1 << 8

	registerFiles     = 2
	registerEventfd   = 4
	updateFiles       = 6
	registerProbe     = 8
	registerBuffers2  = 15
	updateBuffers     = 16
	resourceSparse    = 1 << 0
	opSupported       = 1 << 0
	eventfdDisabled   = 1 << 0
	offSQRing         = 0
	offSQEs           = 0x10000000
	probeOps          = 64
	bytesOfQueueEntry = 16
)

// sqe is a request to the kernel (submission queue entry); cqe is its result.
type sqe struct {
	opcode, flags uint8
	ioprio        uint16
	fd            int32
	off, addr     uint64
	len, rwFlags  uint32
	userData      uint64
	bufIndex      uint16
	personality   uint16
	spliceFD      int32
	_             [2]uint64
}

type cqe struct {
	userData uint64
	res      int32
	flags    uint32
}

type ringOffsets struct {
	head, tail, mask, entries uint32
	a, b, c, d                uint32 // sq: flags, dropped, array, -; cq: overflow, cqes, flags, -
	_                         uint64
}

type ringParams struct {
	sqEntries, cqEntries, flags, cpu, idle, features, wqFD uint32
	_                                                      [3]uint32
	sq, cq                                                 ringOffsets
}

// setup makes the ring and maps its queues.
func (g *ring) setup(entries uint32) error {
	p := ringParams{flags: setupClamp | setupSubmitAll}
	fd, errno := ringSetup(entries, &p)
	if errno == syscall.EINVAL { // before Linux 5.18
		p = ringParams{flags: setupClamp}
		fd, errno = ringSetup(entries, &p)
	}
	if errno != 0 {
		return sysErr("io_uring_setup", errno)
	}
	g.fd = fd
	g.hasTimeout = p.features&featExtArg != 0
	g.sleepTime = unix.NsecToTimespec(sleepMax.Nanoseconds())
	g.waitArg.timeout = uint64(uintptr(unsafe.Pointer(&g.sleepTime)))
	if p.features&featSingleMmap == 0 || p.features&featNoDrop == 0 || p.sqEntries < entries {
		return fmt.Errorf("the kernel's io_uring is too old: features %#x, %d entries", p.features,
			p.sqEntries)
	}
	size := max(uint64(p.sq.c)+4*uint64(p.sqEntries), uint64(p.cq.b)+bytesOfQueueEntry*uint64(
		p.cqEntries))
	rings, err := unix.Mmap(fd, offSQRing, int(size), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		return fmt.Errorf("map io_uring: %w", err)
	}
	entriesMap, err := unix.Mmap(fd, offSQEs, int(p.sqEntries)*int(unsafe.Sizeof(sqe{})),
		unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		return errors.Join(fmt.Errorf("map io_uring: %w", err), unix.Munmap(rings))
	}
	g.ringsMap, g.entriesMap = rings, entriesMap
	word := func(off uint32) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&rings[off])) }
	g.sq = queueMap{head: word(p.sq.head), tail: word(p.sq.tail), mask: word(p.sq.mask).Load()}
	g.cq = queueMap{head: word(p.cq.head), tail: word(p.cq.tail), mask: word(p.cq.mask).Load()}
	if p.cq.c != 0 {
		g.cq.flags = word(p.cq.c)
	}
	g.sqes = unsafe.Slice((*sqe)(unsafe.Pointer(&entriesMap[0])), p.sqEntries)
	g.cqes = unsafe.Slice((*cqe)(unsafe.Pointer(&rings[p.cq.b])), p.cqEntries)
	for i := range p.sqEntries { // entry i of the queue is always the i-th
		word(p.sq.c + 4*i).Store(i)
	}
	return nil
}

func (g *ring) unmap() error {
	if g.ringsMap == nil {
		return nil
	}
	return errors.Join(unix.Munmap(g.ringsMap), unix.Munmap(g.entriesMap))
}

func ringSetup(entries uint32, p *ringParams) (int, syscall.Errno) {
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, uintptr(entries),
		uintptr(unsafe.Pointer(p)), 0)
	return int(fd), errno
}

// rawMax is how many entries one raw system call may submit: the kernel works on them for some ten
// microseconds and does not block.
const rawMax = 8

// enter submits up to n entries and waits for so many completions. For a few entries it makes a
// raw system call, which does not tell the Go scheduler: where cores are scarce, the scheduler
// would otherwise run another thread during each call, and the switch costs more than the call.
func (g *ring) enter(n, wait uint32) syscall.Errno {
	if wait == 0 && n <= rawMax {
		_, _, errno := unix.RawSyscall6(unix.SYS_IO_URING_ENTER, uintptr(g.fd), uintptr(n), 0, 0, 0,
			0)
		return errno
	}
	flags := uintptr(0)
	if wait > 0 {
		flags = enterGetEvents
	}
	_, _, errno := unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(g.fd), uintptr(n), uintptr(wait),
		flags, 0, 0)
	return errno
}

// waitArg is the kernel's struct io_uring_getevents_arg.
type waitArg struct {
	sigmask     uint64
	sigmaskSize uint32
	_           uint32
	timeout     uint64 // address of a timespec
}

// enterFor submits up to n entries and waits for so many completions, or for sleepMax.
func (g *ring) enterFor(n, wait uint32) {
	// Whatever ends the wait, the caller looks at the queues.
	_, _, _ = unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(g.fd), uintptr(n), uintptr(wait),
		enterGetEvents|enterExtArg, uintptr(unsafe.Pointer(&g.waitArg)), unsafe.Sizeof(g.waitArg))
}

func (g *ring) register(what int, arg unsafe.Pointer, n int) error {
	_, _, errno := unix.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(g.fd), uintptr(what),
		uintptr(arg), uintptr(n), 0, 0)
	return sysErr("io_uring_register", errno)
}

// probe checks that the kernel has all operations that the backend uses: Linux 5.6.
func (g *ring) probe() error {
	var p struct {
		last, count uint8
		_           [14]byte
		ops         [probeOps]struct {
			op, _ uint8
			flags uint16
			_     uint32
		}
	}
	if err := g.register(registerProbe, unsafe.Pointer(&p), probeOps); err != nil {
		return err
	}
	for _, op := range []int{opReadv, opWritev, opFsync, opReadFixed, opAsyncCancel,
		opRead, opWrite} {
		if p.ops[op].flags&opSupported == 0 {
			return fmt.Errorf("the kernel's io_uring has no operation %d", op)
		}
	}
	return nil
}

// tryOne submits one request and waits for its completion. A seccomp profile may allow
// io_uring_setup and refuse io_uring_enter. Kick retries all errors, since the kernel may be short
// of memory, and would then never return.
func (g *ring) tryOne() error {
	e := g.nextEntry()
	e.opcode, e.fd, e.userData = opNop, -1, cancelTag
	g.publish()
	for !g.Pending() {
		errno := g.enter(g.sq.tail.Load()-g.sq.head.Load(), 1)
		if errno != 0 && errno != syscall.EINTR {
			return sysErr("io_uring_enter", errno)
		}
	}
	head := g.cq.head.Load()
	answer := g.cqes[head&g.cq.mask]
	g.cq.head.Store(head + 1)
	if answer.userData != cancelTag || answer.res != 0 {
		return fmt.Errorf("io_uring answers %d to a request that does nothing", answer.res)
	}
	return nil
}

func (g *ring) registerEvent(fd int) error {
	v := int32(fd)
	return g.register(registerEventfd, unsafe.Pointer(&v), 1)
}

// registerFiles registers a table of n files, all empty.
func (g *ring) registerFiles(n int) error {
	if n == 0 {
		return errors.ErrUnsupported
	}
	none := make([]int32, n)
	for i := range none {
		none[i] = -1
	}
	return g.register(registerFiles, unsafe.Pointer(&none[0]), n)
}

func (g *ring) updateFile(at, fd int) error {
	v := int32(fd)
	u := struct {
		offset, _ uint32
		fds       uint64
	}{offset: uint32(at), fds: uint64(uintptr(unsafe.Pointer(&v)))}
	err := g.register(updateFiles, unsafe.Pointer(&u), 1)
	runtime.KeepAlive(&v)
	return err
}

// registerBufferTable registers a table of n buffers, all empty: Linux 5.19.
func (g *ring) registerBufferTable(n int) error {
	r := struct {
		nr, flags        uint32
		_, data, tagsPtr uint64
	}{nr: uint32(n), flags: resourceSparse}
	return g.register(registerBuffers2, unsafe.Pointer(&r), int(unsafe.Sizeof(r)))
}

// updateBuffer puts memory into the table; nil removes it.
func (g *ring) updateBuffer(at int, mem []byte) error {
	v := unix.Iovec{}
	if len(mem) > 0 {
		v.Base = &mem[0]
		v.SetLen(len(mem))
	}
	u := struct {
		offset, _  uint32
		data, tags uint64
		nr, _      uint32
	}{offset: uint32(at), data: uint64(uintptr(unsafe.Pointer(&v))), nr: 1}
	err := g.register(updateBuffers, unsafe.Pointer(&u), int(unsafe.Sizeof(u)))
	runtime.KeepAlive(&v)
	return err
}

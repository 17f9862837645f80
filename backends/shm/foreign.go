// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// vectorsMax is what process_vm_readv and process_vm_writev take in one call (UIO_MAXIOV).
const vectorsMax = 1024

// vectors are the arguments of one such call. The first place is the gate's.
type vectors struct {
	n      int    // with the gate
	bytes  uint64 // without
	passed [1]byte
	local  [vectorsMax]unix.Iovec
	remote [vectorsMax]unix.RemoteIovec
}

var vectorPool = sync.Pool{New: func() any { return new(vectors) }}

// add takes one stretch, which is not empty. It reports false when there is no place.
func (v *vectors) add(mine []byte, theirs uint64) bool {
	if last := v.n - 1; last > 0 && v.continues(last, mine, theirs) {
		v.local[last].SetLen(int(v.local[last].Len) + len(mine))
		v.remote[last].Len += len(mine)
	} else {
		if v.n == vectorsMax {
			return false
		}
		v.local[v.n].Base = &mine[0]
		v.local[v.n].SetLen(len(mine))
		v.remote[v.n] = unix.RemoteIovec{Base: uintptr(theirs), Len: len(mine)}
		v.n++
	}
	v.bytes += uint64(len(mine))
	return true
}

// continues reports whether a stretch goes on where one ends, at both ends.
func (v *vectors) continues(last int, mine []byte, theirs uint64) bool {
	return uint64(v.remote[last].Base)+uint64(v.remote[last].Len) == theirs &&
		addressOfByte(v.local[last].Base)+v.local[last].Len == addressOf(mine)
}

// reset forgets the addresses, so that the pool keeps no memory alive.
func (v *vectors) reset() {
	clear(v.local[:v.n])
	v.n, v.bytes = 1, 0
}

// moveForeign copies to or from memory that only its process has.
func (p *peer) moveForeign(pc *piece, epoch *atomic.Uint64) error {
	v := vectorPool.Get().(*vectors)
	defer vectorPool.Put(v)
	defer v.reset()
	v.n = 1
	for i := range pc.n {
		d := pc.at(i)
		if !fits(&d, uint64(len(pc.local.bytes)), pc.remote.size) {
			return driver.ErrBounds // a list has changed since the check
		}
		mine, theirs := pc.local.bytes[d.Local:d.Local+d.Len], pc.remote.base+d.Remote
		if v.add(mine, theirs) {
			continue
		}
		if err := p.flush(v, pc, epoch); err != nil {
			return err
		}
		v.add(mine, theirs)
	}
	return p.flush(v, pc, epoch)
}

// flush copies what was added. A short copy means that the peer unmapped some of it.
func (p *peer) flush(v *vectors, pc *piece, epoch *atomic.Uint64) error {
	defer v.reset()
	n, err := p.passGate(v, pc.op, pc.remote.epoch, epoch)
	if err == nil && uint64(n) != v.bytes {
		err = unix.EFAULT
	}
	if err == unix.EFAULT && p.pid.Dead() {
		err = unix.ESRCH // the number may be another process's by now
	}
	return foreignError(err)
}

// gatesMax is how often an owner may shut the gate before a copy that is not concerned
// gives up. Each time it has met a peer that was silent for Config.Grace.
const gatesMax = 1000

// passGate copies through the gate. The place of the gate is taken before the epoch is
// looked at: an owner ends the epoch first, so a writer that found it good has a place from
// before the revoke, which leads nowhere once that has shut the gate.
//
// A copy that has passed the gate was made in the owner's memory, though its number may be
// another process's by now: that has no page at a place that was drawn for the owner. So who
// copies need not ask the kernel, each time, whether the owner lives.
func (p *peer) passGate(v *vectors, op driver.Op, granted uint64,
	epoch *atomic.Uint64) (n int, err error) {
	v.local[0].Base = &v.passed[0]
	v.local[0].SetLen(1)
	for range gatesMax {
		gate := p.table.gate().Load()
		testpoint.At("shm: gate") // the place of the gate is taken
		if epoch.Load() != granted {
			return 0, driver.ErrRevoked
		}
		v.remote[0] = unix.RemoteIovec{Base: uintptr(gate), Len: 1}
		testpoint.At("shm: passing") // the epoch was good after that
		if op == driver.Write {
			n, err = unix.ProcessVMWritev(p.pid.PID, v.local[:v.n], v.remote[:v.n], 0)
		} else {
			n, err = unix.ProcessVMReadv(p.pid.PID, v.local[:v.n], v.remote[:v.n], 0)
		}
		if err != unix.EFAULT || p.table.gate().Load() == gate {
			return n - 1, err
		}
	}
	return 0, driver.ErrPeerLost
}

// probe finds out whether we may read a process's memory, before a transfer
// depends on it.
func probe(p proc.Remote, base uint64) error {
	var b [1]byte
	local := []unix.Iovec{{Base: &b[0], Len: 1}}
	remote := []unix.RemoteIovec{{Base: uintptr(base), Len: 1}}
	_, err := unix.ProcessVMReadv(p.PID, local, remote, 0)
	return foreignError(err)
}

// errForbidden is the answer where the kernel forbids one process to read another.
var errForbidden error = &driver.UnavailableError{
	Backend: "shm",
	Reason: "foreign memory of another process: " +
		"process_vm_readv and process_vm_writev are not permitted",
	Fix: "sysctl kernel.yama.ptrace_scope=0, or allow both in the container's seccomp profile, " +
		"or allocate the memory with Engine.Alloc",
}

func foreignError(err error) error {
	switch err {
	case nil, driver.ErrRevoked, driver.ErrPeerLost:
		return err // not the kernel's
	case syscall.EPERM, syscall.ENOSYS:
		return errForbidden
	case syscall.ESRCH:
		return driver.ErrPeerLost
	case syscall.EFAULT:
		return driver.ErrFault
	}
	return fmt.Errorf("copy to or from peer's memory: %w",
		os.NewSyscallError("process_vm_readv or process_vm_writev", err))
}

// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/backends"
)

// vectorsMax is what process_vm_readv takes in one call (UIO_MAXIOV).
const vectorsMax = 1024

// vectors are the arguments of one process_vm_readv.
type vectors struct {
	n      int
	bytes  uint64
	local  [vectorsMax]unix.Iovec
	remote [vectorsMax]unix.RemoteIovec
}

var vectorPool = sync.Pool{New: func() any { return new(vectors) }}

// add takes one stretch. into is not empty.
func (v *vectors) add(into []byte, from uint64) {
	v.local[v.n].Base = &into[0]
	v.local[v.n].SetLen(len(into))
	v.remote[v.n] = unix.RemoteIovec{Base: uintptr(from), Len: len(into)}
	v.n++
	v.bytes += uint64(len(into))
}

// flush reads what was added. A short read means that the peer unmapped some of it.
func (v *vectors) flush(pid *processID) error {
	if v.n == 0 {
		return nil
	}
	n, err := unix.ProcessVMReadv(pid.PID, v.local[:v.n], v.remote[:v.n], 0)
	if err == nil && uint64(n) != v.bytes {
		err = unix.EFAULT
	}
	if err == nil && pid.Dead() {
		err = unix.ESRCH // the number may have been another process's by then
	}
	v.reset()
	return foreignError(err)
}

// reset forgets the addresses, so that the pool keeps no memory alive.
func (v *vectors) reset() {
	clear(v.local[:v.n])
	v.n, v.bytes = 0, 0
}

// readForeign reads from memory that only its process has.
func (p *peer) readForeign(pc *piece) error {
	v := vectorPool.Get().(*vectors)
	defer vectorPool.Put(v)
	for i := range pc.n {
		d := pc.at(i)
		v.add(pc.local.bytes[d.Local:d.Local+d.Len], pc.remote.base+d.Remote)
		if v.n == vectorsMax {
			if err := v.flush(&p.pid); err != nil {
				return err
			}
		}
	}
	return v.flush(&p.pid)
}

// at returns entry i of a piece.
func (pc *piece) at(i int) backends.Desc {
	if pc.pages != nil {
		return pc.pages.Desc(pc.first + i)
	}
	return pc.descs[i]
}

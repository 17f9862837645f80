// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// vectored moves the pieces with process_vm_writev or process_vm_readv: what a
// program does that shares no memory with its peer.
type vectored struct {
	pid   int
	write bool
	lists []vectors // one for each list of places
}

// vectors are split where the kernel takes no more.
type vectors struct {
	local  []unix.Iovec
	remote []unix.RemoteIovec
	size   int
}

// iovMax is the kernel's UIO_MAXIOV.
const iovMax = 1024

func newVectored(l *Link, p *plan) *vectored {
	v := &vectored{pid: l.Process, write: p.shape.Op == driver.Write}
	size, stride, step := p.shape.Size, p.shape.stride(), p.shape.step()
	local := l.Local.Bytes()[p.compact:]
	for _, places := range p.places {
		list := vectors{size: int(size)}
		for j, slot := range places {
			iov := unix.Iovec{Base: &local[uint64(j)*step]}
			iov.SetLen(int(size))
			list.local = append(list.local, iov)
			list.remote = append(list.remote, unix.RemoteIovec{
				Base: uintptr(l.Address + p.scattered + uint64(slot)*stride), Len: int(size)})
		}
		v.lists = append(v.lists, list)
	}
	return v
}

func (v *vectored) do(i int) error {
	list := &v.lists[i%len(v.lists)]
	for first := 0; first < len(list.local); first += iovMax {
		end := min(first+iovMax, len(list.local))
		if err := v.call(list.local[first:end], list.remote[first:end], list.size); err != nil {
			return err
		}
	}
	return nil
}

// call moves the vectors, which the kernel may do in part: then piece by piece
// from where it ended is of no use for a baseline, and an error is said.
func (v *vectored) call(local []unix.Iovec, remote []unix.RemoteIovec, size int) error {
	f := unix.ProcessVMReadv
	if v.write {
		f = unix.ProcessVMWritev
	}
	n, err := f(v.pid, local, remote, 0)
	if err != nil {
		return fmt.Errorf("process_vm on process %d: %w", v.pid, err)
	}
	if n != len(local)*size {
		return fmt.Errorf("process_vm on process %d: moved %d of %d bytes", v.pid, n,
			len(local)*size)
	}
	return nil
}

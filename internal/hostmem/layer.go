// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// layer is one memfd as long as the Buffer. A piece of the Buffer that lies in
// it has the same offset there, so a layer serves many calls of Renew with one
// descriptor, and huge pages keep their alignment. What is not used is a hole
// and costs nothing.
type layer struct {
	fd   int
	huge bool
	used spans // of pieces, and old
	old  []oldRange
}

// oldRange is what a piece was in. An old mapping may reach it: it is not used again before over.
type oldRange struct {
	span
	over func() bool
}

// reclaim makes old ranges free that reach into [off, off+n) and that no process writes to any
// more. What late writers have put there is given back.
func (l *layer) reclaim(off, n uint64) {
	l.old = slices.DeleteFunc(l.old, func(o oldRange) bool {
		if o.from >= off+n || o.to <= off || !o.over() {
			return false
		}
		l.discard(o.from, o.to-o.from)
		l.used.remove(o.from, o.to-o.from)
		return true
	})
}

// leave is told that a piece is in this range no more.
func (l *layer) leave(off, n uint64, over func() bool) {
	l.discard(off, n)
	l.old = append(l.old, oldRange{span{off, off + n}, over})
}

const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// newLayer makes a memfd whose size can never change, so that no process that maps
// it dies of SIGBUS, and to which none can add seals that shut us out.
func newLayer(purpose string, size uint64, huge bool) (*layer, error) {
	fd, err := memfd(purpose, huge)
	if err != nil {
		return nil, fmt.Errorf("create memfd: %w", err)
	}
	l := &layer{fd: fd, huge: huge}
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		return nil, errors.Join(fmt.Errorf("size memfd to %d bytes: %w", size, err), l.close())
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		return nil, errors.Join(fmt.Errorf("seal memfd: %w", err), l.close())
	}
	return l, nil
}

func memfd(purpose string, huge bool) (int, error) {
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	if huge {
		flags |= unix.MFD_HUGETLB | unix.MFD_HUGE_2MB
	}
	name := "sluice-" + strings.ReplaceAll(purposeName(purpose), "\x00", "?")
	name = name[:min(len(name), 200)] // the kernel takes 249 bytes
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if err == unix.EINVAL { // before Linux 6.3
		fd, err = unix.MemfdCreate(name, flags)
	}
	return fd, os.NewSyscallError("memfd_create", err)
}

// discard gives the pages of a range back. What an old mapping still writes
// there gets pages of its own. Not with hugetlb: there such a write would find
// no page, and the peer would die of SIGBUS.
func (l *layer) discard(off, n uint64) {
	if !l.huge {
		_ = unix.Fallocate(l.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(off),
			int64(n))
	}
}

func (l *layer) close() error { return os.NewSyscallError("close", unix.Close(l.fd)) }

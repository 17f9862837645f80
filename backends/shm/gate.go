// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// writeGate is a page through which every write into foreign memory passes: a writer's
// process_vm_writev begins with one byte that goes there, and the kernel copies in
// order and ends at the first address that it cannot write to. So when the page is
// shut, a writer that froze before its call writes nothing when it goes on, whatever
// it had looked at before.
//
// The place of a gate is drawn, and no child has it after a fork: a process that got
// the owner's number after its end has nothing there, so a late write ends at once
// there, too. The place of a gate that was shut stays empty until all peers are known
// to be out: something else mapped there would open it again.
//
// A gate is given up only for a peer that stays silent in the middle of a write, and once for
// each such write (silence.go, bar): there are never more than peers have announcements, but for
// writes by tokens that were given out while a fence looked.
type writeGate struct {
	mu   sync.Mutex
	page uintptr   // 0: none
	shut []uintptr // those that were
	over bool      // shut for good
}

// renew tells peers of a new gate, and shuts the one of before, if any. A writer that was
// past that by then is in the middle of its call.
func (g *writeGate) renew(t *table) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.over {
		return driver.ErrClosed
	}
	page, err := mapGate()
	if err != nil {
		return err
	}
	t.gate().Store(uint64(page)) // pairs with the load in flushWrite, before the epoch's
	old := g.page
	g.page = page
	return g.bar(old)
}

// close shuts the gate for good.
func (g *writeGate) close(t *table) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	t.gate().Store(0)
	old := g.page
	g.page, g.over = 0, true
	return g.bar(old)
}

// bar takes a page away and keeps its place.
func (g *writeGate) bar(page uintptr) error {
	if page == 0 {
		return nil
	}
	g.shut = append(g.shut, page)
	return pageCall("mprotect", unix.SYS_MPROTECT, page, unix.PROT_NONE)
}

// release gives all places back, when no peer can be about to write any more.
func (g *writeGate) release() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	var errs []error
	for _, page := range append(g.shut, g.page) {
		if page != 0 {
			errs = append(errs, pageCall("munmap", unix.SYS_MUNMAP, page, 0))
		}
	}
	g.page, g.shut = 0, nil
	return errors.Join(errs...)
}

// mapGate makes a page at a place that is drawn within 46 bits, where programs of 64-bit
// machines rarely have anything. The kernel takes another one where that cannot be had.
func mapGate() (uintptr, error) {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	hint := uintptr(binary.LittleEndian.Uint64(b[:]) & (1<<46 - pageBytes))
	page, _, errno := unix.Syscall6(unix.SYS_MMAP, hint, pageBytes, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, ^uintptr(0), 0)
	if errno != 0 {
		return 0, os.NewSyscallError("mmap", errno)
	}
	if err := pageCall("madvise", unix.SYS_MADVISE, page, unix.MADV_DONTFORK); err != nil {
		return 0, errors.Join(err, pageCall("munmap", unix.SYS_MUNMAP, page, 0))
	}
	return page, nil
}

// pageCall makes a system call about one page that Go knows nothing of.
func pageCall(name string, trap, page, arg uintptr) error {
	if _, _, errno := unix.Syscall(trap, page, pageBytes, arg); errno != 0 {
		return os.NewSyscallError(name, errno)
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// writeGate lets the owner stop late writes into foreign memory.
//
// The owner maps one writable page, the gate, and tells its place in the key table. A writer starts
// every process_vm_writev with one byte for that page. The kernel copies the segments in order and
// stops at the first address that is not writable. When the owner makes the gate unwritable, a
// writer that was stopped before its call therefore writes nothing when it resumes, whatever it had
// looked at before. A writer that is inside the call is not stopped: see shutGate.
//
// The place of a gate is random, and no child has the page after a fork: a process that got the
// owner's number after its end has nothing there, so a late write ends at once there, too. The
// place of a gate that was shut stays empty until all writers that may be about to pass it have
// left: something else mapped there would open it again.
//
// A gate is given up only for a writer that stays silent, and once for each such write.
type writeGate struct {
	mu   sync.Mutex
	page uintptr   // 0: none
	old  []oldGate // those before it
	over bool      // shut for good
}

// oldGate is a page whose address the key table does not have any more.
type oldGate struct {
	page    uintptr
	shut    bool           // mprotect has succeeded: no write passes any more
	writers []announcement // that may have taken it
}

// renew tells peers of a new gate, and shuts the one of before, if any. A writer that was
// past that by then is in the middle of its call. After an error some older gate may be open;
// then no later renew tells of a new one before it has shut that. writers lists those that may
// have taken a gate by the time of its call.
func (g *writeGate) renew(t *table, writers func() []announcement) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.over {
		return driver.ErrClosed
	}
	if err := g.shutOld(); err != nil {
		return err
	}
	if err := g.giveBack(); err != nil {
		return err
	}
	page, err := mapGate()
	if err != nil {
		return err
	}
	t.gate().Store(uint64(page)) // pairs with the load in flushWrite, before the epoch's
	g.retire(page, writers)
	return g.shutOld()
}

// close shuts the gate for good. After an error a gate is open.
func (g *writeGate) close(t *table, writers func() []announcement) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	t.gate().Store(0)
	g.over = true
	g.retire(0, writers)
	return g.shutOld()
}

// retire puts a page in place of the present one, which is still open.
func (g *writeGate) retire(page uintptr, writers func() []announcement) {
	if g.page != 0 {
		g.old = append(g.old, oldGate{page: g.page, writers: writers()})
	}
	g.page = page
}

// shutOld takes away each old page that is open, and keeps its place.
func (g *writeGate) shutOld() error {
	var errs []error
	for i := range g.old {
		if g.old[i].shut {
			continue
		}
		err := pageCall("mprotect", unix.SYS_MPROTECT, g.old[i].page, unix.PROT_NONE)
		g.old[i].shut = err == nil
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// giveBack unmaps the old pages whose writers have left.
func (g *writeGate) giveBack() error {
	return g.unmap(func(o *oldGate) bool {
		o.writers = slices.DeleteFunc(o.writers, func(a announcement) bool { return !a.stands() })
		return o.shut && len(o.writers) == 0
	})
}

// release gives all places back, when no peer can be about to write any more.
func (g *writeGate) release() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.retire(0, func() []announcement { return nil })
	return g.unmap(func(*oldGate) bool { return true })
}

// unmap gives back the places of the old pages that are chosen.
func (g *writeGate) unmap(chosen func(*oldGate) bool) error {
	var errs []error
	g.old = slices.DeleteFunc(g.old, func(o oldGate) bool {
		if !chosen(&o) {
			return false
		}
		err := pageCall("munmap", unix.SYS_MUNMAP, o.page, 0)
		errs = append(errs, err)
		return err == nil
	})
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

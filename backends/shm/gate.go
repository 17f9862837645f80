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
// The owner maps one writable page, the gate, and puts its address in the key table. A writer
// starts every process_vm_writev with one byte for that page. The kernel copies the segments in
// order and stops at the first address that is not writable. When the owner shuts the gate, by
// mprotect, a writer that was stopped before its call therefore writes nothing when it resumes,
// whatever it has checked before. A writer that is inside the call is not stopped: see shutGate.
//
// The address of a gate is random, and a fork does not inherit the page. So if the owner dies and
// another process gets its PID, that process has nothing at the address, and a late write to it
// ends at once. A reader passes the gate for this alone: then what it has read was the owner's. The
// address of a gate that was shut stays reserved until all writers that may still use it have left:
// other memory mapped there would open the gate again.
//
// The owner shuts a gate only because of a silent writer, and once for each such write.
type writeGate struct {
	mu   sync.Mutex
	page uintptr   // the present gate; 0: none
	old  []oldGate // earlier gates whose address is still reserved
	over bool      // close was called
}

// oldGate is a gate that is not in the key table any more.
type oldGate struct {
	page    uintptr
	shut    bool           // mprotect has succeeded: no write passes
	writers []announcement // writers that may have read its address
}

// renew puts a new gate in the key table, and shuts the one before, if there is one. A writer that
// has passed the old gate is then inside its call. After an error an old gate may be open: each
// later renew then tries to shut it first. writers returns the writers that may have read the
// address of a gate by now.
func (g *writeGate) renew(t *table, writers func() []announcement) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.over {
		return driver.ErrClosed
	}
	if err := g.shutOld(); err != nil {
		return err
	}
	if err := g.unmapUnused(); err != nil {
		return err
	}
	page, err := mapGate()
	if err != nil {
		return err
	}
	t.gate().Store(uint64(page)) // pairs with the load in passGate, before the epoch's
	g.retire(page, writers)
	return g.shutOld()
}

// close shuts the gate for good. After an error a gate may be open.
func (g *writeGate) close(t *table, writers func() []announcement) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	t.gate().Store(0)
	g.over = true
	g.retire(0, writers)
	return g.shutOld()
}

// retire makes page the present gate, and the present gate an old one, which is still open.
func (g *writeGate) retire(page uintptr, writers func() []announcement) {
	if g.page != 0 {
		g.old = append(g.old, oldGate{page: g.page, writers: writers()})
	}
	g.page = page
}

// shutOld makes each old gate that is open inaccessible, and keeps its address reserved.
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

// unmapUnused unmaps the old gates whose writers have left.
func (g *writeGate) unmapUnused() error {
	return g.unmap(func(o *oldGate) bool {
		o.writers = slices.DeleteFunc(o.writers, func(a announcement) bool { return !a.stands() })
		return o.shut && len(o.writers) == 0
	})
}

// release unmaps all gates. Precondition: no peer can write any more.
func (g *writeGate) release() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.retire(0, func() []announcement { return nil })
	return g.unmap(func(*oldGate) bool { return true })
}

// unmap unmaps the old gates for which chosen returns true.
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

// mapGate maps a page at a random address of 46 bits, where programs of 64-bit machines rarely have
// anything. The kernel chooses another address if that one is in use.
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

// pageCall makes a system call for one page that the Go runtime does not manage.
func pageCall(name string, trap, page, arg uintptr) error {
	if _, _, errno := unix.Syscall(trap, page, pageBytes, arg); errno != 0 {
		return os.NewSyscallError(name, errno)
	}
	return nil
}

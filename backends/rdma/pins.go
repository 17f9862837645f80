// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// pinned is a range that the NICs know for local use, on all rails or, if it is a device's,
// on those that can.
type pinned struct {
	span
	dmabuf   *driver.DMABuf // ours, as long as it is pinned: grants register it again; nil: none
	readOnly bool           // the NICs must not write to it
	pins     []pin          // by rail; nil: its device is gone, or refusals says why
	refusals []*refusal     // by rail, of device memory
	users    int            // pinnings.mu
}

// pinnings finds ranges that are pinned by address: a registration that is a part of
// another one uses what that one pinned, and costs no call of the kernel.
type pinnings struct {
	b *Backend

	mu      sync.Mutex
	list    []*pinned // by base
	longest uint64    // that ever was: bounds the search
}

// use returns a range that holds s, with one more user. unuse ends that. d is of device
// memory; it is not looked at where a range that is pinned already holds s.
func (t *pinnings) use(s *span, d *driver.DMABuf, readOnly bool) (*pinned, error) {
	if p := t.find(s, readOnly); p != nil {
		return p, nil
	}
	p := &pinned{span: *s, users: 1}
	var err error
	if s.device == onHost {
		err = t.b.pinHost(p, readOnly)
	} else {
		err = t.b.pinDevice(p, d)
	}
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.list = slices.Insert(t.list, t.after(p.base), p)
	t.longest = max(t.longest, p.size)
	return p, nil
}

// Of host memory that was never touched, the driver of a NIC finds the pages on one thread,
// and the kernel zeroes them, which takes longer than all the rest. From faultInMin bytes on,
// some 50 ms of it, threads of ours find them first. findersMax leaves processors of large
// machines to others.
const (
	faultInMin = 64 << 20
	findersMax = 8
)

// pinHost pins host memory on all rails.
func (b *Backend) pinHost(p *pinned, readOnly bool) error {
	err := b.locked.check(p.size, len(b.rails))
	if err != nil {
		return err
	}
	if p.size >= faultInMin && b.finders > 1 {
		hostmem.FaultIn(p.bytes, !readOnly, b.finders)
	}
	p.pins, err = b.pinAll(p.bytes, 0)
	if errors.Is(err, syscall.EFAULT) || errors.Is(err, syscall.EPERM) ||
		errors.Is(err, syscall.EACCES) {
		if !readOnly {
			return err
		}
		p.readOnly = true // pages that the program itself may not write
		p.pins, err = b.pinAll(p.bytes, verbs.ReadOnly)
	}
	if err != nil {
		return b.locked.explain(err, p.size, len(b.rails))
	}
	return nil
}

// after returns the index of the first range that begins past an address.
// Preconditions: t.mu is held.
func (t *pinnings) after(from uint64) int {
	return sort.Search(len(t.list), func(i int) bool { return t.list[i].base > from })
}

func (t *pinnings) find(s *span, readOnly bool) *pinned {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := t.after(s.base) - 1; i >= 0 && t.list[i].base+t.longest >= s.end(); i-- {
		if p := t.list[i]; p.holds(s) && (readOnly || !p.readOnly) {
			p.users++
			return p
		}
	}
	return nil
}

func (t *pinnings) unuse(p *pinned) error {
	t.mu.Lock()
	last := p.users == 1
	if last { // which it stays: after an error this is called again
		t.list = slices.DeleteFunc(t.list, func(other *pinned) bool { return other == p })
	} else {
		p.users--
	}
	t.mu.Unlock()
	if !last {
		return nil
	}
	if err := closePins(p.pins); err != nil {
		return err
	}
	return hostmem.CloseDMABuf(p.dmabuf)
}

func closePins(pins []pin) error {
	var errs []error
	for _, p := range pins {
		if p != nil {
			errs = append(errs, p.Close())
		}
	}
	return errors.Join(errs...)
}

// pinAll pins a range on all rails at once: large ranges take long.
func (b *Backend) pinAll(mem []byte, flags uint32) ([]pin, error) {
	pins := make([]pin, len(b.rails))
	err := b.onRails(func(r *rail) (err error) {
		pins[r.index], err = b.net.pin(r.index, mem, flags|b.pinFlags())
		return err
	})
	if err != nil {
		return nil, errors.Join(err, closePins(pins))
	}
	return pins, nil
}

// pinFlags are those of every registration.
func (b *Backend) pinFlags() uint32 {
	if b.cfg.RelaxedOrdering {
		return verbs.Relaxed
	}
	return 0
}

// onRails does something on each rail that is there, at once where there are several.
func (b *Backend) onRails(do func(r *rail) error) error {
	errs := make([]error, len(b.rails))
	attempt := func(i int, r *rail) {
		if !r.gone.Load() {
			errs[i] = do(r)
		}
		if r.gone.Load() {
			errs[i] = nil // it went meanwhile: the others serve
		}
	}
	var wg sync.WaitGroup
	for i, r := range b.rails[1:] {
		wg.Go(func() { attempt(i+1, r) })
	}
	attempt(0, b.rails[0])
	wg.Wait()
	return errors.Join(errs...)
}

// memlock knows how much memory this process may pin. The kernel counts a range once for
// each registration of it: on each rail, and again while peers may reach it.
type memlock struct {
	exempt bool                                 // CAP_IPC_LOCK
	limits func() (limit, used uint64, ok bool) // in bytes
}

const (
	capIPCLock = 14
	memlockFix = "ulimit -l unlimited; LimitMEMLOCK=infinity in a systemd unit; --ulimit " +
		"memlock=-1 for a container"
)

func thisMemlock() memlock {
	mask, err := strconv.ParseUint(statusField("CapEff"), 16, 64)
	return memlock{exempt: err == nil && mask&(1<<capIPCLock) != 0, limits: memlockNow}
}

func memlockNow() (limit, used uint64, ok bool) {
	var r unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r) != nil || r.Cur == unix.RLIM_INFINITY {
		return 0, 0, false
	}
	for _, name := range []string{"VmPin", "VmLck"} {
		kilobytes, _, _ := strings.Cut(statusField(name), " ")
		n, _ := strconv.ParseUint(kilobytes, 10, 64) // absent is none
		used += n << 10
	}
	return r.Cur, used, true
}

// statusField reads a line of /proc/self/status.
func statusField(name string) string {
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// check says ahead that a range cannot be pinned on so many rails.
func (m *memlock) check(n uint64, rails int) error {
	if m.exempt {
		return nil
	}
	limit, used, ok := m.limits()
	if !ok || n <= (limit-min(used, limit))/uint64(rails) {
		return nil
	}
	return memlockError(fmt.Sprintf("%d bytes on %d rails cannot be pinned: RLIMIT_MEMLOCK is %d "+
		"bytes, of which %d are used", n, rails, limit, used))
}

// explain says what a refusal of the kernel may come from.
func (m *memlock) explain(err error, n uint64, rails int) error {
	if !errors.Is(err, syscall.ENOMEM) && !errors.Is(err, syscall.EAGAIN) {
		return err
	}
	return memlockError(fmt.Sprintf("%d bytes on %d rails cannot be pinned: %v", n, rails, err))
}

func memlockError(reason string) error {
	return unavailable(reason, memlockFix)
}

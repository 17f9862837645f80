// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sort"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// pinned is a range of memory that the NICs have registered for local access. Host memory is
// registered on every rail. Device memory is registered on each rail that supports it; refusals
// holds the errors of the others.
type pinned struct {
	span
	dmabuf   *driver.DMABuf // our duplicate, kept for later grants; nil: no dma-buf
	readOnly bool           // the NICs must not write to it
	pins     []verbs.Pin    // by rail; nil: not registered there (refusals), or the device is gone
	refusals []error        // by rail; nil for host memory
	users    int            // registrations in this range; guarded by pinnings.mu
}

// pinnings shares pinned ranges between registrations. A registration that lies inside a range
// that is already pinned uses that range, without a system call.
type pinnings struct {
	b *Backend

	mu      sync.Mutex
	list    []*pinned // sorted by base
	longest uint64    // size of the longest range so far; bounds the search in find
}

// use returns a pinned range that contains s, and counts the caller as one of its users until
// unuse. d is the dma-buf of device memory; use ignores it when a pinned range contains s already.
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

// A NIC's driver pins memory on one thread. Most of that time goes into page faults on memory that
// was never touched, because the kernel zeroes each page. From faultInMin bytes on (about 50 ms of
// faults), several threads of the backend touch the pages before they are pinned: one for each
// CPU, but at most faultThreadsMax, to leave CPUs of large machines to the program.
const (
	faultInMin      = 64 << 20
	faultThreadsMax = 8
)

// pinHost pins host memory on all rails.
func (b *Backend) pinHost(p *pinned, readOnly bool) error {
	if p.size >= faultInMin && b.faultThreads > 1 {
		hostmem.FaultIn(p.bytes, !readOnly, b.faultThreads)
	}
	var err error
	p.pins, err = b.pinAll(p, 0)
	if errors.Is(err, syscall.EFAULT) || errors.Is(err, syscall.EPERM) ||
		errors.Is(err, syscall.EACCES) {
		if !readOnly {
			return err
		}
		p.readOnly = true // the program has mapped the pages without write permission
		p.pins, err = b.pinAll(p, verbs.ReadOnly)
	}
	return b.explainPin(err, p.size)
}

// after returns the index of the first range whose base is above an address.
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
	if last { // users stays 1: the caller calls unuse again after an error
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

func closePins(pins []verbs.Pin) error {
	var errs []error
	for _, p := range pins {
		if p != nil {
			errs = append(errs, p.Close())
		}
	}
	return errors.Join(errs...)
}

// pinAll pins a range on all rails in parallel, because large ranges take long.
func (b *Backend) pinAll(p *pinned, flags uint32) ([]verbs.Pin, error) {
	pins := make([]verbs.Pin, len(b.rails))
	memory := verbs.Range{Addr: p.base, Len: p.size, FD: -1}
	err := b.onRails(func(r *rail) (err error) {
		pins[r.index], err = b.net.Pin(r.index, memory, flags|b.pinFlags())
		return err
	})
	if err != nil {
		return nil, errors.Join(err, closePins(pins))
	}
	return pins, nil
}

// pinFlags returns the access flags that every registration has.
func (b *Backend) pinFlags() uint32 {
	if b.cfg.RelaxedOrdering {
		return verbs.Relaxed
	}
	return 0
}

// onRails calls do for each rail whose device is not gone, in parallel. It ignores the error of a
// rail whose device goes away during the call.
func (b *Backend) onRails(do func(r *rail) error) error {
	errs := make([]error, len(b.rails))
	attempt := func(i int, r *rail) {
		if !r.gone.Load() {
			errs[i] = do(r)
		}
		if r.gone.Load() {
			errs[i] = nil // the device went away during do: the other rails carry the traffic
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

const memlockFix = "ulimit -l unlimited; LimitMEMLOCK=infinity in a systemd unit; --ulimit " +
	"memlock=-1 for a container"

// explainPin adds RLIMIT_MEMLOCK to an error of pinning host memory that the limit may have caused.
// The kernel counts a range against the limit once for each registration: one for each rail, and
// one more for each rail while peers can access the range.
func (b *Backend) explainPin(err error, n uint64) error {
	if !errors.Is(err, syscall.ENOMEM) && !errors.Is(err, syscall.EAGAIN) {
		return err
	}
	var r unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r) // never fails
	return unavailable(fmt.Sprintf("%d bytes on %d rails cannot be pinned: %v; RLIMIT_MEMLOCK is "+
		"%d bytes", n, len(b.rails), err, r.Cur), memlockFix)
}

// peermemModules lists the kernel modules that let a NIC register device memory by its address.
// nv_peer_mem is the older, separate package; nvidia_peermem comes with NVIDIA's driver.
var peermemModules = []string{"nvidia_peermem", "nv_peer_mem"}

func (s *sysfs) peermem() bool {
	return slices.ContainsFunc(peermemModules, func(name string) bool {
		return s.there("module", name)
	})
}

// canPinDevice reports whether device memory can be registered on any rail.
func (b *Backend) canPinDevice() bool {
	return b.peermem || slices.ContainsFunc(b.rails, func(r *rail) bool { return r.info.DMABuf })
}

// pinDevice pins device memory on each rail that supports it, and keeps the errors of the others
// in p.refusals. It fails when no rail can pin the memory.
func (b *Backend) pinDevice(p *pinned, d *driver.DMABuf) (err error) {
	if p.dmabuf, err = hostmem.DupDMABuf(d); err != nil {
		return err
	}
	p.pins, p.refusals = make([]verbs.Pin, len(b.rails)), make([]error, len(b.rails))
	_ = b.onRails(func(r *rail) error { // always nil: the errors go to p.refusals
		p.pins[r.index], p.refusals[r.index] = b.pinDeviceOn(r, p)
		return nil
	})
	if slices.ContainsFunc(p.pins, func(on verbs.Pin) bool { return on != nil }) {
		return nil
	}
	return errors.Join(b.refused(p), hostmem.CloseDMABuf(p.dmabuf))
}

// pinDeviceOn pins device memory on one rail. It tries the dma-buf first, since that needs no
// extra kernel module, and then the address, which needs nvidia_peermem.
func (b *Backend) pinDeviceOn(r *rail, p *pinned) (on verbs.Pin, err error) {
	memory := verbs.Range{Addr: p.base, Len: p.size, FD: -1}
	switch {
	case p.dmabuf == nil:
		err = errors.New("the Segment has no dma-buf")
	case !r.info.DMABuf:
		err = errors.New("its driver, or libibverbs, takes no dma-buf")
	default:
		memory.FD, memory.Offset = p.dmabuf.FD, p.dmabuf.Offset
		if on, err = b.net.Pin(r.index, memory, b.pinFlags()); err == nil {
			return on, nil
		}
		err = fmt.Errorf("dma-buf: %w", err)
	}
	if !b.peermem {
		return nil, fmt.Errorf("%w, and nvidia_peermem is not loaded", err)
	}
	memory.FD, memory.Offset = -1, 0
	on, e := b.net.Pin(r.index, memory, b.pinFlags())
	if e != nil {
		return nil, fmt.Errorf("%w, and nvidia_peermem: %w", err, e)
	}
	return on, nil
}

const (
	peermemFix = "modprobe nvidia_peermem and open the backend again"
	handleFix  = "set Segment.DMABuf (cuMemGetHandleForAddressRange, CUDA 11.7 or later), or " +
		peermemFix
	dmabufFix = peermemFix + ", or take Linux 5.12 or later with a driver that registers " +
		"dma-bufs, and libibverbs 1.12 (rdma-core 34) or later"
)

// refused returns the error of device memory that no rail could pin, with the error of each rail.
// If no rail could even try, the error also says what would let the backend pin the memory.
func (b *Backend) refused(p *pinned) error {
	err := fmt.Errorf("no rail takes %d bytes of device memory at %#x", p.size, p.base)
	tried := b.peermem
	for i, r := range b.rails {
		tried = tried || p.dmabuf != nil && r.info.DMABuf
		err = fmt.Errorf("%w; %v: %w", err, r, cmp.Or(p.refusals[i], errRailGone))
	}
	switch {
	case tried:
		return fmt.Errorf("%w (is the memory allocated, and all of it in the dma-buf?)", err)
	case p.dmabuf == nil:
		return unavailable(err.Error(), handleFix)
	}
	return unavailable(err.Error(), dmabufFix)
}

var errRailGone = errors.New("its device is gone")

// whyNotPinned returns why a rail could not pin device memory. It returns "" when the rail has
// pinned it, and for host memory.
func (p *pinned) whyNotPinned(rail int) string {
	if p.refusals == nil || p.pins[rail] != nil {
		return ""
	}
	return cmp.Or(p.refusals[rail], errRailGone).Error()
}

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

// pinned is a range that the NICs know for local use, on all rails or, if it is a device's,
// on those that can.
type pinned struct {
	span
	dmabuf   *driver.DMABuf // ours, as long as it is pinned: grants register it again; nil: none
	readOnly bool           // the NICs must not write to it
	pins     []pin          // by rail; nil: its device is gone, or refusals says why
	refusals []error        // by rail, of device memory
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
	if p.size >= faultInMin && b.finders > 1 {
		hostmem.FaultIn(p.bytes, !readOnly, b.finders)
	}
	var err error
	p.pins, err = b.pinAll(p.bytes, 0)
	if errors.Is(err, syscall.EFAULT) || errors.Is(err, syscall.EPERM) ||
		errors.Is(err, syscall.EACCES) {
		if !readOnly {
			return err
		}
		p.readOnly = true // pages that the program itself may not write
		p.pins, err = b.pinAll(p.bytes, verbs.ReadOnly)
	}
	return b.explainPin(err, p.size)
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

const memlockFix = "ulimit -l unlimited; LimitMEMLOCK=infinity in a systemd unit; --ulimit " +
	"memlock=-1 for a container"

// explainPin says what a refusal of the kernel to pin host memory may come from. The kernel counts
// a range once for each registration of it: on each rail, and again while peers may reach it.
func (b *Backend) explainPin(err error, n uint64) error {
	if !errors.Is(err, syscall.ENOMEM) && !errors.Is(err, syscall.EAGAIN) {
		return err
	}
	var r unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r) // never fails
	return unavailable(fmt.Sprintf("%d bytes on %d rails cannot be pinned: %v; RLIMIT_MEMLOCK is "+
		"%d bytes", n, len(b.rails), err, r.Cur), memlockFix)
}

// peermemModules have the kernel take device addresses like its own; the second is what the
// first was called before it came with the driver.
var peermemModules = []string{"nvidia_peermem", "nv_peer_mem"}

func (s *sysfs) peermem() bool {
	return slices.ContainsFunc(peermemModules, func(name string) bool {
		return s.there("module", name)
	})
}

// takesDevices reports whether device memory can be registered on any rail.
func (b *Backend) takesDevices() bool {
	return b.peermem || slices.ContainsFunc(b.rails, func(r *rail) bool { return r.info.DMABuf })
}

// pinDevice pins device memory on each rail that can. The others are left out, and the
// range knows why.
func (b *Backend) pinDevice(p *pinned, d *driver.DMABuf) (err error) {
	if p.dmabuf, err = hostmem.DupDMABuf(d); err != nil {
		return err
	}
	p.pins, p.refusals = make([]pin, len(b.rails)), make([]error, len(b.rails))
	_ = b.onRails(func(r *rail) error { // there is none: each rail has its own answer
		p.pins[r.index], p.refusals[r.index] = b.pinDeviceOn(r, p)
		return nil
	})
	if slices.ContainsFunc(p.pins, func(on pin) bool { return on != nil }) {
		return nil
	}
	return errors.Join(b.refused(p), hostmem.CloseDMABuf(p.dmabuf))
}

// pinDeviceOn tries the dma-buf first, for which the kernel needs no further module.
func (b *Backend) pinDeviceOn(r *rail, p *pinned) (on pin, err error) {
	memory := verbs.Device{Addr: p.base, Len: p.size, FD: -1}
	switch {
	case p.dmabuf == nil:
		err = errors.New("the Segment has no dma-buf")
	case !r.info.DMABuf:
		err = errors.New("its driver, or libibverbs, takes no dma-buf")
	default:
		memory.FD, memory.Offset = p.dmabuf.FD, p.dmabuf.Offset
		if on, err = b.net.pinDevice(r.index, memory, b.pinFlags()); err == nil {
			return on, nil
		}
		err = fmt.Errorf("dma-buf: %w", err)
	}
	if !b.peermem {
		return nil, fmt.Errorf("%w, and nvidia_peermem is not loaded", err)
	}
	memory.FD, memory.Offset = -1, 0
	on, e := b.net.pinDevice(r.index, memory, b.pinFlags())
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

// refused says why no rail knows the memory: what this machine lacks, if nothing could be tried, or
// how what was tried has failed.
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

// leftOut says why a rail does not know device memory; empty: it does, or it is host memory.
func (p *pinned) leftOut(rail int) string {
	if p.refusals == nil || p.pins[rail] != nil {
		return ""
	}
	return cmp.Or(p.refusals[rail], errRailGone).Error()
}

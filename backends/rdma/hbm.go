// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

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

// refusal is why a rail does not know device memory.
type refusal struct {
	ways []string // what is missing, and what has failed
	err  error    // of what was tried; nil: nothing could be
}

func (f *refusal) String() string {
	if f == nil {
		return "its device is gone"
	}
	return strings.Join(f.ways, ", and ")
}

func (f *refusal) lacks(what string) { f.ways = append(f.ways, what) }

func (f *refusal) failed(way string, err error) {
	f.ways = append(f.ways, fmt.Sprintf("%s: %v", way, err))
	f.err = errors.Join(f.err, err)
}

// pinDevice pins device memory on each rail that can. The others are left out, and the
// range knows why.
func (b *Backend) pinDevice(p *pinned, d *driver.DMABuf) (err error) {
	if p.dmabuf, err = hostmem.DupDMABuf(d); err != nil {
		return err
	}
	p.pins, p.refusals = make([]pin, len(b.rails)), make([]*refusal, len(b.rails))
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
func (b *Backend) pinDeviceOn(r *rail, p *pinned) (pin, *refusal) {
	no := &refusal{}
	memory := verbs.Device{Addr: p.base, Len: p.size, FD: -1}
	switch {
	case p.dmabuf == nil:
		no.lacks("the Segment has no dma-buf")
	case !r.info.DMABuf:
		no.lacks("its driver, or libibverbs, takes no dma-buf")
	default:
		memory.FD, memory.Offset = p.dmabuf.FD, p.dmabuf.Offset
		on, err := b.net.pinDevice(r.index, memory, b.pinFlags())
		if err == nil {
			return on, nil
		}
		no.failed("dma-buf", err)
	}
	if !b.peermem {
		no.lacks("nvidia_peermem is not loaded")
		return nil, no
	}
	memory.FD, memory.Offset = -1, 0
	on, err := b.net.pinDevice(r.index, memory, b.pinFlags())
	if err == nil {
		return on, nil
	}
	no.failed("nvidia_peermem", err)
	return nil, no
}

const (
	peermemFix = "modprobe nvidia_peermem and open the backend again"
	handleFix  = "set Segment.DMABuf (cuMemGetHandleForAddressRange, CUDA 11.7 or later), or " +
		peermemFix
	dmabufFix = peermemFix + ", or take Linux 5.12 or later with a driver that registers " +
		"dma-bufs, and libibverbs 1.12 (rdma-core 34) or later"
)

// refused says why no rail knows the memory: what this machine lacks, if nothing could be
// tried, or how what was tried has failed.
func (b *Backend) refused(p *pinned) error {
	why, fix := make([]string, len(b.rails)), dmabufFix
	var tried []error
	for i, r := range b.rails {
		why[i] = fmt.Sprintf("%v: %v", r, p.refusals[i])
		if no := p.refusals[i]; no != nil && no.err != nil {
			tried = append(tried, no.err)
		}
	}
	text := fmt.Sprintf("no rail takes %d bytes of device memory at %#x: %s", p.size, p.base,
		strings.Join(why, "; "))
	if tried != nil {
		return &deviceError{text + " (is the memory allocated, and all of it in the dma-buf?)",
			tried}
	}
	if p.dmabuf == nil {
		fix = handleFix
	}
	return unavailable(text, fix)
}

// leftOut says why a rail does not know device memory; empty: it does, or it is host memory.
func (p *pinned) leftOut(rail int) string {
	if p.refusals == nil || p.pins[rail] != nil {
		return ""
	}
	return p.refusals[rail].String()
}

// deviceError names each rail once, and is what they failed with.
type deviceError struct {
	text string
	errs []error
}

func (e *deviceError) Error() string   { return e.text }
func (e *deviceError) Unwrap() []error { return e.errs }

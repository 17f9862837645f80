// SPDX-License-Identifier: Apache-2.0

package main

// #include "faces.h"
import "C"

import (
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// memory is the object of a handle of sluice_alloc. It belongs to no engine.
type memory struct {
	m *engine.Memory

	mu     sync.Mutex // guards what follows
	users  int        // regions on it
	closed bool
}

// region is the object of a region handle: registered memory.
type region struct {
	of   *openEngine
	r    *engine.Region
	mem  *memory // nil: memory of the program's
	once sync.Once
}

//export slgoAlloc
func slgoAlloc(h C.uint64_t, o *C.struct_sluice_alloc_options, length C.uint64_t, out,
	address *C.uint64_t, f *C.struct_slgo_fault) C.int {
	e, err := engines.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	if o.flags&^(C.SLUICE_NO_HUGE|C.SLUICE_POPULATE) != 0 || o.reserved != 0 {
		return answer(f, argument("sluice_alloc_options.flags is %#x: that does not exist",
			o.flags))
	}
	m, err := e.Alloc(uint64(length), engine.AllocOptions{
		Purpose: "c", Node: int(o.node),
		NoHuge: o.flags&C.SLUICE_NO_HUGE != 0, Populate: o.flags&C.SLUICE_POPULATE != 0,
	})
	if err != nil {
		return answer(f, err)
	}
	handle, err := memories.put(&memory{m: m})
	if err != nil {
		_ = m.Close()
		return answer(f, err)
	}
	*out = C.uint64_t(handle)
	setAddress(address, m.Bytes())
	return C.SLUICE_OK
}

//export slgoMemoryClose
func slgoMemoryClose(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	m, err := memories.get(uint64(h))
	if err == nil {
		err = m.close()
	}
	if err == nil {
		memories.drop(uint64(h))
	}
	return answer(f, err)
}

func (m *memory) close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.users > 0 {
		return fmt.Errorf(
			"close memory: %d regions lie on it, close them or their engine first: %w", m.users,
			engine.ErrBusy)
	}
	m.closed = true
	return m.m.Close()
}

// use returns a range of the memory for a region, and counts the region. The region calls unuse at
// its end.
func (m *memory) use(off, n uint64) (driver.Segment, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return driver.Segment{}, fmt.Errorf("register memory: %w", engine.ErrClosed)
	}
	seg := m.m.Segment()
	if n == 0 && off < seg.Len {
		n = seg.Len - off
	}
	seg, err := seg.Slice(off, n, [16]byte{})
	if err == nil {
		m.users++
	}
	return seg, err
}

func (m *memory) unuse() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.users--
}

//export slgoRegister
func slgoRegister(h C.uint64_t, name *C.char, s *C.struct_sluice_segment, out *C.uint64_t,
	f *C.struct_slgo_fault) C.int {
	e, err := engines.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	handle, err := e.register(name, s)
	if err != nil {
		return answer(f, err)
	}
	*out = C.uint64_t(handle)
	return C.SLUICE_OK
}

// segment returns the memory that a region registers.
func (r *region) segment(s *C.struct_sluice_segment) (seg driver.Segment, err error) {
	if s.flags&^(C.SLUICE_READ_ONLY|C.SLUICE_PRIVATE|C.SLUICE_DMABUF|C.SLUICE_EXTENDS|
		C.SLUICE_BUFFERED) != 0 {
		return seg, argument("sluice_segment.flags is %#x: that does not exist", s.flags)
	}
	switch s.kind {
	case C.SLUICE_MEMORY:
		m, err := memories.get(uint64(s.memory))
		if err != nil {
			return seg, err
		}
		if seg, err = m.use(uint64(s.offset), uint64(s.length)); err != nil {
			return seg, err
		}
		r.mem = m
	case C.SLUICE_HOST:
		seg, err = hostSegment(s)
	case C.SLUICE_DEVICE:
		seg = driver.Segment{Kind: driver.HBM, Len: uint64(s.length), Device: int(s.device),
			Addr: uint64(s.device_address)}
		if s.flags&C.SLUICE_DMABUF != 0 {
			seg.DMABuf = &driver.DMABuf{FD: int(s.dmabuf), Offset: uint64(s.dmabuf_offset)}
		}
	case C.SLUICE_FILE:
		seg = driver.Segment{Kind: driver.File, Len: uint64(s.length), FD: int(s.file),
			FileOff: uint64(s.offset), Extends: s.flags&C.SLUICE_EXTENDS != 0,
			Buffered: s.flags&C.SLUICE_BUFFERED != 0}
	default:
		return seg, argument("sluice_segment.kind is %d: there are SLUICE_MEMORY, SLUICE_HOST, "+
			"SLUICE_DEVICE and SLUICE_FILE", s.kind)
	}
	seg.ReadOnly = s.flags&C.SLUICE_READ_ONLY != 0
	return seg, err
}

//export slgoRegionClose
func slgoRegionClose(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	return answer(f, closeRegion(uint64(h)))
}

// release ends the use of a memory of sluice_alloc, once, no matter what has closed the region.
func (r *region) release() {
	r.once.Do(func() {
		if r.mem != nil {
			r.mem.unuse()
		}
	})
}

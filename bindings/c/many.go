// SPDX-License-Identifier: Apache-2.0

package main

// #include "faces.h"
import "C"

import (
	"errors"
	"fmt"
)

// Calls for many at once: a call from Python costs more than most of what is done here for one.

// register registers one region and returns its handle.
func (e *openEngine) register(name *C.char, s *C.struct_sluice_segment) (uint64, error) {
	r := &region{of: e}
	seg, err := r.segment(s)
	if err != nil {
		return 0, err
	}
	register := e.Register
	if s.flags&C.SLUICE_PRIVATE != 0 {
		register = e.RegisterPrivate
	}
	if r.r, err = register(C.GoString(name), seg); err != nil {
		r.release()
		return 0, err
	}
	handle, err := adopt(e, &regions, r)
	if err != nil && r.r.Close() == nil { // otherwise the engine's Close does it, without proof
		r.release()
	}
	return handle, err
}

//export slgoRegisterMany
func slgoRegisterMany(h C.uint64_t, names **C.char, list *C.struct_sluice_segment, count C.size_t,
	out *C.uint64_t, f *C.struct_slgo_fault) C.int {
	e, err := engines.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	texts, err := inPlace[*C.char](names, uint64(count), "names")
	segments, err2 := inPlace[C.struct_sluice_segment](list, uint64(count), "segments")
	handles, err3 := inPlace[C.uint64_t](out, uint64(count), "regions")
	if err := errors.Join(err, err2, err3); err != nil {
		return answer(f, err)
	}
	clear(handles)
	for i := range segments {
		handle, err := e.register(texts[i], &segments[i])
		if err != nil {
			for at := range handles[:i] {
				if closeRegion(uint64(handles[at])) == nil {
					handles[at] = 0
				}
			}
			return answer(f, fmt.Errorf("segments[%d]: %w", i, err))
		}
		handles[i] = C.uint64_t(handle)
	}
	return C.SLUICE_OK
}

func closeRegion(h uint64) error {
	r, err := regions.get(h)
	if err == nil {
		err = r.r.Close()
	}
	if err == nil {
		regions.drop(h)
		r.release()
	}
	return err
}

//export slgoRegionCloseMany
func slgoRegionCloseMany(list *C.uint64_t, count C.size_t, f *C.struct_slgo_fault) C.int {
	handles, err := inPlace[C.uint64_t](list, uint64(count), "regions")
	if err != nil {
		return answer(f, err)
	}
	for i, h := range handles {
		if err := closeRegion(uint64(h)); err != nil {
			return answer(f, fmt.Errorf("regions[%d]: %w", i, err))
		}
	}
	return C.SLUICE_OK
}

//export slgoRemoteFindMany
func slgoRemoteFindMany(h C.uint64_t, names **C.char, count C.size_t, out, bytes *C.uint64_t,
	f *C.struct_slgo_fault) C.int {
	p, err := peers.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	texts, err := inPlace[*C.char](names, uint64(count), "names")
	handles, err2 := inPlace[C.uint64_t](out, uint64(count), "remotes")
	lengths, err3 := inPlace[C.uint64_t](bytes, uint64(count), "lengths")
	if err := errors.Join(err, err2, err3); err != nil {
		return answer(f, err)
	}
	for i, name := range texts {
		m, err := p.p.Remote(C.GoString(name))
		if code := p.found(m, err, &handles[i], f); code != C.SLUICE_OK {
			return code
		}
		lengths[i] = C.uint64_t(m.Size())
	}
	return C.SLUICE_OK
}

//export slgoTransferAddMany
func slgoTransferAddMany(h C.uint64_t, list *C.struct_sluice_copy, count C.size_t,
	f *C.struct_slgo_fault) C.int {
	t, err := hold(h)
	if err != nil {
		return answer(f, err)
	}
	defer t.release()
	copies, err := inPlace[C.struct_sluice_copy](list, uint64(count), "copies")
	if err != nil {
		return answer(f, err)
	}
	for i := range copies {
		c := &copies[i]
		r, m, err := pair(c.region, c.remote)
		if err == nil {
			err = t.t.Add(r.r, uint64(c.desc.local), m.m, uint64(c.desc.remote),
				uint64(c.desc.length))
		}
		if err != nil {
			return answer(f, fmt.Errorf("copies[%d]: %w", i, err))
		}
	}
	return C.SLUICE_OK
}

// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package copy

/*
#cgo CFLAGS: -O2 -std=c11 -Wall -Wextra
#cgo noescape sl_guarded_descs
#cgo nocallback sl_guarded_descs
#cgo noescape sl_guarded_pages
#cgo nocallback sl_guarded_pages
#cgo noescape sl_guarded_nest
#cgo nocallback sl_guarded_nest
#cgo noescape sl_guarded_stream
#cgo nocallback sl_guarded_stream
#include "guarded.h"
*/
import "C"

import (
	"unsafe"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// What C reads as it is: equal sizes in both directions, equal offsets.
const (
	_ = uint(unsafe.Sizeof(driver.Desc{}) - unsafe.Sizeof(C.struct_sl_desc{}))
	_ = uint(unsafe.Sizeof(C.struct_sl_desc{}) - unsafe.Sizeof(driver.Desc{}))
	_ = uint(unsafe.Offsetof(driver.Desc{}.RemoteKey) -
		unsafe.Offsetof(C.struct_sl_desc{}.remote_key))
	_ = uint(unsafe.Offsetof(C.struct_sl_desc{}.remote_key) -
		unsafe.Offsetof(driver.Desc{}.RemoteKey))
	_ = uint(unsafe.Offsetof(driver.Desc{}.Len) - unsafe.Offsetof(C.struct_sl_desc{}.len))
	_ = uint(unsafe.Offsetof(C.struct_sl_desc{}.len) - unsafe.Offsetof(driver.Desc{}.Len))

	_ = uint(unsafe.Sizeof(driver.Loop{}) - unsafe.Sizeof(C.struct_sl_copy_loop{}))
	_ = uint(unsafe.Sizeof(C.struct_sl_copy_loop{}) - unsafe.Sizeof(driver.Loop{}))
	_ = uint(unsafe.Offsetof(driver.Loop{}.Local) - unsafe.Offsetof(C.struct_sl_copy_loop{}.local))
	_ = uint(unsafe.Offsetof(driver.Loop{}.Remote) -
		unsafe.Offsetof(C.struct_sl_copy_loop{}.remote))
)

// Implements: int sl_guarded_descs(uint8_t *local, uint64_t local_len, ...)
func copyDescs(op driver.Op, local, remote []byte, descs []driver.Desc, w Way) error {
	rc := C.sl_guarded_descs(bytePtr(local), C.uint64_t(len(local)),
		bytePtr(remote), C.uint64_t(len(remote)),
		(*C.struct_sl_desc)(unsafe.Pointer(unsafe.SliceData(descs))),
		C.size_t(len(descs)), toRemote(op), C.uint64_t(w))
	return result(rc)
}

// Implements: int sl_guarded_pages(uint8_t *local, uint64_t local_len, ...)
func copyPlain(op driver.Op, local, remote []byte, p *driver.Pattern, first, n int,
	w Way) error {
	rc := C.sl_guarded_pages(bytePtr(local), C.uint64_t(len(local)),
		bytePtr(remote), C.uint64_t(len(remote)),
		listPtr(p.Local.List), C.uint64_t(p.Local.Base), C.uint64_t(p.Local.Stride),
		listPtr(p.Remote.List), C.uint64_t(p.Remote.Base), C.uint64_t(p.Remote.Stride),
		C.uint64_t(p.Run), C.size_t(first), C.size_t(n), toRemote(op), C.uint64_t(w))
	return result(rc)
}

// Implements: int sl_guarded_nest(uint8_t *local, uint64_t local_len, ...)
func copyNest(op driver.Op, local, remote []byte, p *driver.Pattern, first, n int, w Way) error {
	sides := [2]C.struct_sl_copy_side{side(&p.Local), side(&p.Remote)}
	rc := C.sl_guarded_nest(bytePtr(local), C.uint64_t(len(local)),
		bytePtr(remote), C.uint64_t(len(remote)),
		&sides[0], listPtr(p.Local.List), listPtr(p.Remote.List),
		(*C.struct_sl_copy_loop)(unsafe.Pointer(unsafe.SliceData(p.Loops))), C.int(len(p.Loops)),
		C.uint64_t(p.Run), C.uint64_t(first), C.uint64_t(n), toRemote(op), C.uint64_t(w))
	return result(rc)
}

func side(s *driver.Side) C.struct_sl_copy_side {
	return C.struct_sl_copy_side{base: C.uint64_t(s.Base), stride: C.uint64_t(s.Stride),
		step: C.uint64_t(s.Step), first: C.uint32_t(s.First), per: C.uint32_t(s.Per)}
}

func bytePtr(b []byte) *C.uint8_t { return (*C.uint8_t)(unsafe.Pointer(unsafe.SliceData(b))) }

func listPtr(list []uint32) *C.uint32_t {
	return (*C.uint32_t)(unsafe.Pointer(unsafe.SliceData(list)))
}

func toRemote(op driver.Op) C.int {
	if op == driver.Write {
		return 1
	}
	return 0
}

const streams = true

func stream(dst, src []byte) {
	n := min(len(dst), len(src))
	if n > 0 && C.sl_guarded_stream(bytePtr(dst), bytePtr(src), C.uint64_t(n)) != 0 {
		hostmem.RaiseFault()
	}
}

// result knows the errnos of the copies.
func result(rc C.int) error {
	switch rc {
	case 0:
		return nil
	case -C.EFAULT:
		return driver.ErrFault
	}
	return driver.ErrBounds
}

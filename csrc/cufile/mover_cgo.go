// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cufile

/*
#cgo CFLAGS: -O2 -std=c11 -Wall -Wextra
#cgo LDFLAGS: -ldl
#cgo noescape sl_cufile_put
#cgo nocallback sl_cufile_put
#include <stdlib.h>
#include <errno.h>
#include "mover.h"
*/
import "C"

import (
	"fmt"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
)

// Requests cross into C as they lie in Go. Each pair of lines is one equality, in both directions.
const (
	_ = uint(unsafe.Sizeof(Request{}) - unsafe.Sizeof(C.struct_sl_cufile_request{}))
	_ = uint(unsafe.Sizeof(C.struct_sl_cufile_request{}) - unsafe.Sizeof(Request{}))
	_ = uint(unsafe.Offsetof(Request{}.Device) -
		unsafe.Offsetof(C.struct_sl_cufile_request{}.device))
	_ = uint(C.SL_CUFILE_DEVICES - Devices)
	_ = uint(Devices - C.SL_CUFILE_DEVICES)
	_ = uint(C.SL_CUFILE_BATCH_MAX - BatchMax)
	_ = uint(BatchMax - C.SL_CUFILE_BATCH_MAX)
	_ = uint(C.SL_CUFILE_EDGE_MAX - EdgeMax)
	_ = uint(EdgeMax - C.SL_CUFILE_EDGE_MAX)
	_ = uint(C.SL_CUFILE_EDGE - Edge)
	_ = uint(Edge - C.SL_CUFILE_EDGE)
)

// before returns an error unless libcuda is open.
func before() error { return cuda.Loaded() }

// loadLibrary opens the library. It returns "", or the reason why it cannot and what to do.
// Implements: int sl_cufile_load(const char *path, char *why, size_t size)
func loadLibrary(path string) (reason, fix string) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	var why [512]C.char
	switch C.sl_cufile_load(name, &why[0], C.size_t(len(why))) {
	case 0:
		return "", ""
	case -C.ENODEV:
		return C.GoString(&why[0]), "load nvidia-fs, or allow compat mode in cufile.json " +
			"(properties.allow_compat_mode)"
	}
	return C.GoString(&why[0]), "install libcufile of the CUDA toolkit, or name its path"
}

func result(call string, rc C.CUfileError_t) error {
	if rc.err == 0 {
		return nil
	}
	return &Error{call, int(rc.err), int(rc.cu_err)}
}

// ReadFacts returns the properties that the library reports. Load must have succeeded.
func ReadFacts() (Facts, error) {
	var f C.struct_sl_cufile_facts
	if rc := C.sl_cufile_facts(&f); rc.err != 0 {
		return Facts{}, result("get driver properties", rc)
	}
	return Facts{
		Version: int(f.version), Batches: f.batches != 0,
		ForceCompat: int8(f.force_compat),
		PCIP2PDMA:   int8(f.p2pdma),
		NVFSMajor:   int(f.nvfs_major), NVFSMinor: int(f.nvfs_minor),
		BatchMax:  int(f.batch_max),
		DirectMax: uint64(f.direct_max), PinnedMax: uint64(f.pinned_max),
		CacheMax: uint64(f.cache_max),
	}, nil
}

// Mover queues requests, which its threads hand to the library. All methods may be called by any
// goroutine, and none after Close.
type Mover struct {
	c       *C.struct_sl_cufile_mover
	cancels []uint32
}

// OpenMover starts the threads, as many as workers. slots is a power of two and at most the places
// of the ends. most is how many requests a thread hands over at a time, as a batch; 1: by single
// calls. Load must have succeeded. Implements: int sl_cufile_mover_open(struct sl_cufile_mover
// **mover, ...)
func OpenMover(ends *cuda.Ends, slots, workers, most int) (*Mover, error) {
	m := &Mover{}
	if rc := C.sl_cufile_mover_open(&m.c, (*C.struct_sl_cuda_ends)(ends.Pointer()),
		C.uint32_t(slots), C.uint32_t(workers), C.unsigned(most)); rc != 0 {
		return nil, fmt.Errorf("start threads for cuFile: %w", syscall.Errno(-rc))
	}
	m.cancels = unsafe.Slice((*uint32)(unsafe.Pointer(m.c.cancel)), slots)
	return m, nil
}

// Close ends the threads. All requests must have completed.
func (m *Mover) Close() { C.sl_cufile_mover_close(m.c) }

// Put queues requests, whose slots must be free: one crossing, no allocation. Each completes once,
// in the ends.
func (m *Mover) Put(list []Request) {
	C.sl_cufile_put(m.c, (*C.struct_sl_cufile_request)(unsafe.Pointer(unsafe.SliceData(list))),
		C.size_t(len(list)))
}

// Cancel keeps the request of a slot from beginning, unless it has begun. yes false takes that
// back: the next user of the slot calls that first. Cancel does not cross into C.
func (m *Mover) Cancel(slot uint32, yes bool) {
	v := uint32(0)
	if yes {
		v = 1
	}
	atomic.StoreUint32(&m.cancels[slot], v)
}

// BatchesRefused returns how often the library has refused a batch as too large.
func (m *Mover) BatchesRefused() uint64 {
	return atomic.LoadUint64((*uint64)(unsafe.Pointer(&m.c.lessened)))
}

// Use retains the context of a device until Close.
func (m *Mover) Use(ordinal int) error {
	return cuda.Result("open device", int32(C.sl_cufile_device(m.c, C.int(ordinal))))
}

// DeviceOf is as cuda.Mover.DeviceOf, by the context of a device that is in use.
func (m *Mover) DeviceOf(ordinal int, at, n uint64) (device int, until uint64, err error) {
	var d C.int
	var end C.uint64_t
	rc := C.sl_cufile_whose(m.c, C.int(ordinal), C.uint64_t(at), C.uint64_t(n), &d, &end)
	return int(d), uint64(end), cuda.Result("look device memory up", int32(rc))
}

// Register registers memory with cuFile: of a device that is in use, or of the host.
func (m *Mover) Register(ordinal int, at, n uint64) error {
	return result("register memory", C.sl_cufile_register(m.c, C.int(ordinal), C.uint64_t(at),
		C.uint64_t(n)))
}

// Deregister undoes Register.
func (m *Mover) Deregister(ordinal int, at uint64) error {
	return result("deregister memory", C.sl_cufile_deregister(m.c, C.int(ordinal), C.uint64_t(at)))
}

// Open registers a file with cuFile. The descriptor must stay open until Close.
func Open(fd int) (handle uint64, err error) {
	var h C.uint64_t
	rc := C.sl_cufile_open(C.int(fd), &h)
	return uint64(h), result("register file", rc)
}

// Close undoes Open. No request may use the handle.
func Close(handle uint64) { C.sl_cufile_close(C.uint64_t(handle)) }

// Status returns the error of a Done whose Status is negative.
func Status(call string, d *ring.Done) error {
	switch {
	case d.Piece != 0:
		return cuda.Result(call, d.Piece)
	case d.Status <= -base:
		return &Error{call, int(-d.Status), 0}
	case d.Status == -C.ECANCELED:
		return driver.ErrAborted
	}
	return syscall.Errno(-d.Status)
}

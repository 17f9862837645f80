// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

/*
#cgo CFLAGS: -O2 -std=c11 -Wall -Wextra
#cgo LDFLAGS: -ldl
#cgo noescape sl_cuda_write
#cgo noescape sl_cuda_read
#cgo noescape sl_cuda_launch
#cgo nocallback sl_cuda_launch
#include <stdlib.h>
#include <errno.h>
#include "device.h"
*/
import "C"

import (
	"fmt"
	"sync"
	"unsafe"

	"github.com/sluicehq/sluice/driver"
)

// loadLibrary opens the library and returns "", or why not and what to do.
// Implements: int sl_cuda_load(const char *path, char *why, size_t size)
func loadLibrary(path string) (reason, fix string) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	var why [512]C.char
	switch C.sl_cuda_load(name, &why[0], C.size_t(len(why))) {
	case 0:
		return "", ""
	case -C.ENODEV:
		return C.GoString(&why[0]), "see what nvidia-smi says of the devices"
	}
	return C.GoString(&why[0]), "install NVIDIA's driver, which has it"
}

// Devices returns how many devices the driver shows. Load must have succeeded.
func Devices() (int, error) {
	if err := Loaded(); err != nil {
		return 0, err
	}
	n := C.sl_cuda_count()
	if n <= 0 {
		return 0, openError(0, C.CUDA_ERROR_NO_DEVICE)
	}
	return int(n), nil
}

// Device is a device with its primary context and a stream of the lowest priority. Its
// methods may be called by any goroutine, one after the other; those of a closed one answer
// driver.ErrClosed.
type Device struct {
	mu   sync.Mutex
	c    C.struct_sl_cuda
	open bool
}

// Open opens a device by its number. Load must have succeeded.
func Open(ordinal int) (*Device, error) {
	if err := Loaded(); err != nil {
		return nil, err
	}
	d := &Device{open: true}
	if rc := C.sl_cuda_open(&d.c, C.int(ordinal)); rc != 0 {
		return nil, openError(ordinal, rc)
	}
	return d, nil
}

func openError(ordinal int, rc C.int) error {
	switch rc {
	case C.CUDA_ERROR_NO_DEVICE:
		return library.Unavailable("the driver has no device", "see what nvidia-smi says, and "+
			"CUDA_VISIBLE_DEVICES")
	case C.CUDA_ERROR_INVALID_DEVICE:
		return library.Unavailable(fmt.Sprintf("there is no device %d", ordinal),
			"count them with nvidia-smi -L, from 0")
	}
	return Status("open device", int32(rc))
}

func result(call string, rc C.int) error {
	if rc == 0 {
		return nil
	}
	return &Error{call, int(rc), C.GoString(C.sl_cuda_error(rc))}
}

// with runs a call unless the device is closed.
func (d *Device) with(call string, f func(c *C.struct_sl_cuda) C.int) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.open {
		return driver.ErrClosed
	}
	return result(call, f(&d.c))
}

// Facts returns the properties of the device.
func (d *Device) Facts() Facts {
	return Facts{C.GoString(&d.c.name[0]), C.GoString(&d.c.bus[0]), int(d.c.driver),
		int(d.c.compute), int(d.c.sms), uint32(d.c.shared)}
}

// Close waits for the work on the stream and releases the device. It is idempotent.
func (d *Device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.open {
		d.open = false
		C.sl_cuda_close(&d.c)
	}
	return nil
}

// Load has the driver compile PTX and finds up to three kernels in it, which Launch counts
// from 0. Once for a device; after a failure another module may be tried.
func (d *Device) Load(ptx string, kernels []string) error {
	return d.with("load module", func(c *C.struct_sl_cuda) C.int {
		return loadModule(ptx, kernels, func(text *C.char, names **C.char) C.int {
			return C.sl_cuda_load_module(c, text, names)
		})
	})
}

func loadModule(ptx string, kernels []string, load func(text *C.char, names **C.char) C.int) C.int {
	text := C.CString(ptx)
	defer C.free(unsafe.Pointer(text))
	names := (*[C.SL_CUDA_KERNELS]*C.char)(C.calloc(C.SL_CUDA_KERNELS, C.sizeof_uintptr_t))
	defer C.free(unsafe.Pointer(names))
	for i := range min(len(names), len(kernels)) {
		names[i] = C.CString(kernels[i])
		defer C.free(unsafe.Pointer(names[i]))
	}
	return load(text, &names[0])
}

// Alloc returns the address of n bytes of device memory.
func (d *Device) Alloc(n uint64) (at uint64, err error) {
	var address C.CUdeviceptr
	err = d.with("allocate device memory", func(c *C.struct_sl_cuda) C.int {
		return C.sl_cuda_alloc(c, C.size_t(n), &address)
	})
	return uint64(address), err
}

// Free gives memory of Alloc back.
func (d *Device) Free(at uint64) error {
	return d.with("free device memory", func(c *C.struct_sl_cuda) C.int {
		return C.sl_cuda_free(c, C.CUdeviceptr(at))
	})
}

// Pin makes host memory reachable by the device and returns its address there. The memory
// must lie outside the Go heap, and stay until Unpin.
func (d *Device) Pin(mem []byte) (at uint64, err error) {
	var address C.CUdeviceptr
	err = d.with("pin host memory", func(c *C.struct_sl_cuda) C.int {
		return C.sl_cuda_pin(c, unsafe.Pointer(unsafe.SliceData(mem)), C.size_t(len(mem)), &address)
	})
	return uint64(address), err
}

// Unpin undoes Pin.
func (d *Device) Unpin(mem []byte) error {
	return d.with("unpin host memory", func(c *C.struct_sl_cuda) C.int {
		return C.sl_cuda_host_unpin(c.context, unsafe.Pointer(unsafe.SliceData(mem)))
	})
}

// Write copies to device memory and waits for the end.
func (d *Device) Write(to uint64, from []byte) error {
	return d.with("copy to device", func(c *C.struct_sl_cuda) C.int {
		return C.sl_cuda_write(c, C.CUdeviceptr(to), unsafe.Pointer(unsafe.SliceData(from)),
			C.size_t(len(from)))
	})
}

// Read copies from device memory and waits for the end.
func (d *Device) Read(to []byte, from uint64) error {
	return d.with("copy from device", func(c *C.struct_sl_cuda) C.int {
		return C.sl_cuda_read(c, unsafe.Pointer(unsafe.SliceData(to)), C.CUdeviceptr(from),
			C.size_t(len(to)))
	})
}

// Copy puts a copy between addresses on the stream, of memory that the driver knows.
func (d *Device) Copy(dst, src, n uint64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.open {
		return driver.ErrClosed
	}
	return result("copy", C.sl_cuda_copy(&d.c, C.uint64_t(dst), C.uint64_t(src), C.uint64_t(n)))
}

// Launch runs a kernel and waits for its end. l.Tally comes back to tally, pinned memory; nil: the
// kernel's args say where it counts. After an error it may be under way: Sync.
func (d *Device) Launch(l *Launch, tally []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.open {
		return driver.ErrClosed
	}
	rc := C.sl_cuda_launch(&d.c, C.int(l.Kernel), C.unsigned(l.Blocks), C.unsigned(l.Threads),
		C.unsigned(l.Shared),
		bytePtr(l.Args), C.CUdeviceptr(l.Tally), bytePtr(tally), C.size_t(len(tally)))
	return result("run kernel", rc)
}

// Sync waits for all work on the stream.
func (d *Device) Sync() error {
	return d.with("wait for stream", func(c *C.struct_sl_cuda) C.int { return C.sl_cuda_sync(c) })
}

// StreamDone reports whether all work on the stream is done.
func (d *Device) StreamDone() (over bool, err error) {
	err = d.with("ask for stream", func(c *C.struct_sl_cuda) C.int {
		rc := C.sl_cuda_over(c.context, c.stream, 0)
		over = rc == 0
		return unlessNotReady(rc)
	})
	return over && err == nil, err
}

func unlessNotReady(rc C.int) C.int {
	if rc == C.CUDA_ERROR_NOT_READY {
		return 0
	}
	return rc
}

// Handle returns the CUstream of the stream.
func (d *Device) Handle() uintptr { return uintptr(unsafe.Pointer(d.c.stream)) }

// NewEvent makes a CUevent, which Drop destroys.
func (d *Device) NewEvent() (uintptr, error) {
	var event C.uint64_t
	err := d.with("make event", func(c *C.struct_sl_cuda) C.int {
		return C.sl_cuda_event_make(c, &event)
	})
	return uintptr(event), err
}

// Drop destroys an event.
func (d *Device) Drop(event uintptr) error {
	return d.with("destroy event", func(c *C.struct_sl_cuda) C.int {
		return C.sl_cuda_event_drop(c, C.uint64_t(event))
	})
}

// Record records an event on the stream: it completes when all work before it has.
func (d *Device) Record(event uintptr) error {
	return d.with("record event", func(c *C.struct_sl_cuda) C.int {
		return C.sl_cuda_record(c, C.uint64_t(event))
	})
}

// Await makes all later work on the stream wait for an event.
func (d *Device) Await(event uintptr) error {
	return d.with("wait for event", func(c *C.struct_sl_cuda) C.int {
		return C.sl_cuda_wait_event(c, C.uint64_t(event))
	})
}

// Result is the error that a CUresult stands for, nil for 0.
func Result(call string, rc int32) error { return result(call, C.int(rc)) }

func bytePtr(b []byte) *C.uint8_t { return (*C.uint8_t)(unsafe.Pointer(unsafe.SliceData(b))) }

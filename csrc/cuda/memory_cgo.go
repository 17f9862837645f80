// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

/*
#include <errno.h>

#include "mover.h"
*/
import "C"

import (
	"fmt"
	"os"
	"unsafe"

	"github.com/sluicehq/sluice/driver"
)

// Pin makes host memory known to all devices. It must lie outside the Go heap and stay until
// Unpin. driver.ErrBusy: a part of it is pinned already.
func (m *Mover) Pin(mem []byte) error {
	rc := C.sl_cuda_host_pin(m.c.context, unsafe.Pointer(unsafe.SliceData(mem)), C.size_t(len(mem)))
	if rc == C.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED {
		return driver.ErrBusy
	}
	return result("pin host memory", rc)
}

// Unpin undoes Pin.
func (m *Mover) Unpin(mem []byte) error {
	return result("unpin host memory", C.sl_cuda_host_unpin(m.c.context,
		unsafe.Pointer(unsafe.SliceData(mem))))
}

// HostAddress returns the address by which kernels reach pinned memory.
func (m *Mover) HostAddress(mem []byte) (at uint64, err error) {
	var address C.CUdeviceptr
	rc := C.sl_cuda_host_address(m.c.context, unsafe.Pointer(unsafe.SliceData(mem)), &address)
	return uint64(address), result("find pinned memory", rc)
}

// HostPinned reports whether all of mem is pinned, in one piece, by this package or the program.
func (m *Mover) HostPinned(mem []byte) bool {
	return bool(C.sl_cuda_host_pinned(m.c,
		C.uint64_t(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))), C.uint64_t(len(mem))))
}

// DeviceOf returns the device that has n bytes at an address. If no device has all of them, until
// is the address at which its memory ends.
func (m *Mover) DeviceOf(at, n uint64) (device int, until uint64, err error) {
	var d C.int
	var end C.uint64_t
	rc := C.sl_cuda_whose(m.c, C.uint64_t(at), C.uint64_t(n), &d, &end)
	return int(d), uint64(end), result("look device memory up", rc)
}

// Place allocates pinned memory, and device memory of the same length. Displace frees both.
func (m *Mover) Place(n int) (Place, error) {
	var host unsafe.Pointer
	var at C.CUdeviceptr
	if rc := C.sl_cuda_place_open(m.c, C.size_t(n), &host, &at); rc != 0 {
		return Place{}, result("allocate room for indices", rc)
	}
	return Place{unsafe.Slice((*byte)(host), n), uint64(at)}, nil
}

// Displace frees a Place.
func (m *Mover) Displace(p Place) {
	C.sl_cuda_place_close(m.c, unsafe.Pointer(unsafe.SliceData(p.Host)), C.CUdeviceptr(p.At))
}

// Block is device memory, which outlives movers. One goroutine at a time may use it.
type Block struct {
	c       C.struct_sl_cuda_block
	At, Len uint64
}

// NewBlock allocates n bytes. Load must have succeeded.
func NewBlock(ordinal int, n uint64) (*Block, error) {
	b := &Block{Len: n}
	if rc := C.sl_cuda_block_open(C.int(ordinal), C.size_t(n), &b.c); rc != 0 {
		return nil, result("allocate device memory", rc)
	}
	b.At = uint64(b.c.at)
	return b, nil
}

// Close frees the memory.
func (b *Block) Close() error {
	return result("free device memory", C.sl_cuda_block_close(&b.c))
}

// Export returns a dma-buf of all of the block, which the caller closes, and where in it the block
// begins. A descriptor of -1 without an error: the driver or device has no dma-bufs.
func (b *Block) Export() (fd int, off uint64, err error) {
	var f C.int
	var o C.uint64_t
	rc := C.sl_cuda_block_export(&b.c, C.size_t(os.Getpagesize()), &f, &o)
	return int(f), uint64(o), result("export a dma-buf", rc)
}

// Share returns a descriptor by which another process of the host can map the memory that is under
// the block now. The caller closes it. driver.ErrNotSupported: memory, driver or device cannot do
// that.
func (b *Block) Share() (fd int, err error) {
	var f C.int
	rc := C.sl_cuda_block_share(&b.c, &f)
	return int(f), shareResult("export device memory", rc)
}

// ImportBlock maps n bytes that another process has shared. The caller closes the descriptor.
// driver.ErrNotSupported: the driver cannot do that.
func ImportBlock(ordinal, fd int, n uint64) (*Block, error) {
	b := &Block{Len: n}
	if rc := C.sl_cuda_block_import(C.int(ordinal), C.int(fd), C.size_t(n), &b.c); rc != 0 {
		return nil, shareResult("map device memory of another process", rc)
	}
	b.At = uint64(b.c.at)
	return b, nil
}

// Renew puts other physical memory with the same content under the block's addresses: the memory
// that other processes have mapped is not used any more. It waits for all work of this process on
// the device; nothing may use the block meanwhile.
func (b *Block) Renew() error {
	return shareResult("put other device memory under a range", C.sl_cuda_block_renew(&b.c))
}

// Mapped returns the bytes of a mapping of the whole block.
func (b *Block) Mapped() uint64 { return uint64(b.c.mapped) }

// UUID returns the UUID of a device: ordinals may differ between processes.
func UUID(ordinal int) (id [16]byte, err error) {
	rc := C.sl_cuda_uuid(C.int(ordinal), (*C.uint8_t)(unsafe.Pointer(&id)))
	return id, shareResult("name a device", rc)
}

func shareResult(call string, rc C.int) error {
	if rc == -C.EOPNOTSUPP {
		return fmt.Errorf("%s: driver, device or memory cannot: %w", call, driver.ErrNotSupported)
	}
	return result(call, rc)
}

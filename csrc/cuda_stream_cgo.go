// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package csrc

/*
#include "cuda_stream.h"
*/
import "C"

import "unsafe"

// CUDAStream is a stream of the program's own with events, for who has no other binding of CUDA.
// All methods may be called by any goroutine, and none after Close.
type CUDAStream struct{ c C.struct_sl_cuda_stream }

// OpenCUDAStream makes a stream on a device by its number. LoadCUDA must have succeeded.
// Implements: int sl_cuda_stream_open(int device, struct sl_cuda_stream *s)
func OpenCUDAStream(ordinal int) (*CUDAStream, error) {
	if err := loadMover(); err != nil {
		return nil, err
	}
	s := &CUDAStream{}
	if rc := C.sl_cuda_stream_open(C.int(ordinal), &s.c); rc != 0 {
		return nil, cudaResult("open stream", rc)
	}
	return s, nil
}

// Handle is its CUstream.
func (s *CUDAStream) Handle() uintptr { return handleOf(s.c.stream) }

// Copy puts a copy between addresses on the stream, of memory that the driver knows.
func (s *CUDAStream) Copy(dst, src, n uint64) error {
	return cudaResult("copy", C.sl_cuda_stream_copy(&s.c, C.uint64_t(dst), C.uint64_t(src), C.uint64_t(n)))
}

// NewEvent makes a CUevent, for Drop.
func (s *CUDAStream) NewEvent() (uintptr, error) {
	var event C.uint64_t
	rc := C.sl_cuda_event_make(&s.c, &event)
	return uintptr(event), cudaResult("make event", rc)
}

// Drop destroys an event.
func (s *CUDAStream) Drop(event uintptr) error {
	return cudaResult("destroy event", C.sl_cuda_event_drop(&s.c, C.uint64_t(event)))
}

// Record has an event happen when the stream has come so far.
func (s *CUDAStream) Record(event uintptr) error {
	return cudaResult("record event", C.sl_cuda_stream_record(&s.c, C.uint64_t(event)))
}

// Await has what follows on the stream wait for an event.
func (s *CUDAStream) Await(event uintptr) error {
	return cudaResult("wait for event", C.sl_cuda_stream_wait(&s.c, C.uint64_t(event)))
}

// Sync returns when all that is on the stream is done.
func (s *CUDAStream) Sync() error { return cudaResult("wait for stream", C.sl_cuda_stream_sync(&s.c)) }

// Close waits for what is on the stream.
func (s *CUDAStream) Close() error { return cudaResult("close stream", C.sl_cuda_stream_close(&s.c)) }

func handleOf(s C.CUstream) uintptr { return uintptr(unsafe.Pointer(s)) }

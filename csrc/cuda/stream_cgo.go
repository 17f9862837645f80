// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

/*
#include "stream.h"
*/
import "C"

import "unsafe"

// Stream is a stream of the program's own with events, for a program without another binding of
// CUDA. All methods may be called by any goroutine, and none after Close.
type Stream struct{ c C.struct_sl_cuda_stream }

// OpenStream makes a stream on a device by its number. Load must have succeeded.
// Implements: int sl_cuda_stream_open(int device, struct sl_cuda_stream *s)
func OpenStream(ordinal int) (*Stream, error) {
	if err := LoadMover(); err != nil {
		return nil, err
	}
	s := &Stream{}
	if rc := C.sl_cuda_stream_open(C.int(ordinal), &s.c); rc != 0 {
		return nil, result("open stream", rc)
	}
	return s, nil
}

// Handle is its CUstream.
func (s *Stream) Handle() uintptr { return handleOf(s.c.stream) }

// Copy puts a copy between addresses on the stream, of memory that the driver knows.
func (s *Stream) Copy(dst, src, n uint64) error {
	return result("copy", C.sl_cuda_stream_copy(&s.c, C.uint64_t(dst), C.uint64_t(src),
		C.uint64_t(n)))
}

// NewEvent makes a CUevent, for Drop.
func (s *Stream) NewEvent() (uintptr, error) {
	var event C.uint64_t
	rc := C.sl_cuda_event_make(&s.c, &event)
	return uintptr(event), result("make event", rc)
}

// Drop destroys an event.
func (s *Stream) Drop(event uintptr) error {
	return result("destroy event", C.sl_cuda_event_drop(&s.c, C.uint64_t(event)))
}

// Record has an event happen when the stream has come so far.
func (s *Stream) Record(event uintptr) error {
	return result("record event", C.sl_cuda_stream_record(&s.c, C.uint64_t(event)))
}

// Await has what follows on the stream wait for an event.
func (s *Stream) Await(event uintptr) error {
	return result("wait for event", C.sl_cuda_stream_wait(&s.c, C.uint64_t(event)))
}

// Over reports whether all that is on the stream is done.
func (s *Stream) Over() (bool, error) {
	return over("ask for stream", C.sl_cuda_over(s.c.context, s.c.stream, 0))
}

// Sync returns when all that is on the stream is done.
func (s *Stream) Sync() error { return result("wait for stream", C.sl_cuda_stream_sync(&s.c)) }

// Close waits for what is on the stream.
func (s *Stream) Close() error { return result("close stream", C.sl_cuda_stream_close(&s.c)) }

func handleOf(s C.CUstream) uintptr { return uintptr(unsafe.Pointer(s)) }

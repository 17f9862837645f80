// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

/*
#cgo noescape sl_cuda_submit
#cgo nocallback sl_cuda_submit
#cgo noescape sl_cuda_submit_run
#cgo nocallback sl_cuda_submit_run
#cgo noescape sl_cuda_gather
#cgo nocallback sl_cuda_gather
#cgo nocallback sl_cuda_cancel
#include <stdlib.h>
#include <errno.h>
#include "mover.h"
*/
import "C"

import (
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
)

// The structs that cross into C unchanged must have the same layout there: with another one, a
// constant is negative and does not compile.
const (
	_ = uint(unsafe.Sizeof(Piece{}) - unsafe.Sizeof(C.struct_sl_cuda_piece{}))
	_ = uint(unsafe.Sizeof(C.struct_sl_cuda_piece{}) - unsafe.Sizeof(Piece{}))
	_ = uint(unsafe.Offsetof(Piece{}.Index) - unsafe.Offsetof(C.struct_sl_cuda_piece{}.index))
	_ = uint(unsafe.Sizeof(Run{}) - unsafe.Sizeof(C.struct_sl_cuda_run{}))
	_ = uint(unsafe.Sizeof(C.struct_sl_cuda_run{}) - unsafe.Sizeof(Run{}))
	_ = uint(unsafe.Offsetof(Run{}.Args) - unsafe.Offsetof(C.struct_sl_cuda_run{}.args))
	_ = uint(C.SL_CUDA_WAITS_MAX - WaitsMax)
	_ = uint(C.ECANCELED + Canceled)
	_ = uint(-Canceled - C.ECANCELED)
	_ = uint(C.SL_CUDA_ANY - Any)
)

// Status returns the error for a Done.Status.
func Status(call string, status int32) error {
	switch {
	case status == Canceled:
		return driver.ErrAborted
	case status == -C.EFAULT:
		return driver.ErrFault
	case status < 0:
		return fmt.Errorf("%s: %w", call, syscall.Errno(-status))
	}
	return result(call, C.int(status))
}

// Ends is the ring in which movers report the batches that have ended. Only one goroutine at a time
// may call Poll; any may call the other methods.
type Ends struct {
	c    *C.struct_sl_cuda_ends
	ring ring.Ring
	heed *atomic.Uint32
}

// NewEnds makes a ring for so many batches, a power of two. wakeFD is an eventfd that is written to
// after a completion, once for each Arm; heedFD is one that is written to after each completion
// while the count of AddWaiting is not 0. The caller closes both, after Close. Implements: int
// sl_cuda_ends_open(struct sl_cuda_ends **ends, ...)
func NewEnds(places, wakeFD, heedFD int) (*Ends, error) {
	e := &Ends{}
	if rc := C.sl_cuda_ends_open(&e.c, C.uint32_t(places), C.int(wakeFD), C.int(heedFD)); rc != 0 {
		return nil, fmt.Errorf("make room for %d ends: %w", places, syscall.Errno(-rc))
	}
	r := e.c.ring
	e.ring = ring.New(unsafe.Pointer(&r.head), unsafe.Pointer(&r.tail), unsafe.Pointer(&r.armed),
		unsafe.Pointer(&r.notifs),
		unsafe.Pointer(&r.first_len), unsafe.Pointer(&r.due),
		unsafe.Pointer(uintptr(unsafe.Pointer(r))+unsafe.Sizeof(*r)), places)
	e.heed = (*atomic.Uint32)(unsafe.Pointer(&e.c.heed))
	return e, nil
}

// Poll takes completions off the ring. It does not cross into C.
func (e *Ends) Poll(done []ring.Done) int { return e.ring.Poll(done) }

// Arm asks for one write to wakeFD, and reports whether the ring has a completion already.
func (e *Ends) Arm() bool { return e.ring.Arm() }

// Disarm undoes Arm. It reports whether the ring was armed.
func (e *Ends) Disarm() bool { return e.ring.Armed.Load() != 0 && e.ring.Armed.Swap(0) != 0 }

// AddWaiting adds to the count of batches for which a goroutine waits on heedFD.
func (e *Ends) AddWaiting(n int) { e.heed.Add(uint32(n)) }

// Close frees the ring. All movers must be closed.
func (e *Ends) Close() { C.sl_cuda_ends_close(e.c) }

// Mover moves batches on the streams of a device. Batches have numbers below the places of its
// Ends. A number is in use until Poll has returned its completion. All methods may be called by any
// goroutine, and none after Close.
type Mover struct {
	c       *C.struct_sl_cuda_mover
	streams int
	gates   sync.Mutex
}

// OpenMover opens streams of a device that batches share, and room for as many that wait for
// events. Load must have succeeded. Errors are as Open's.
// Implements: int sl_cuda_mover_open(struct sl_cuda_mover **mover, ...)
func OpenMover(ordinal int, ends *Ends, places, streams, gated int) (*Mover, error) {
	if err := Loaded(); err != nil {
		return nil, err
	}
	m := &Mover{streams: streams}
	if rc := C.sl_cuda_mover_open(&m.c, C.int(ordinal), ends.c, C.uint32_t(places),
		C.int(streams), C.int(gated)); rc != 0 {
		return nil, openError(ordinal, rc)
	}
	return m, nil
}

// Close waits for batches in progress and frees the mover.
func (m *Mover) Close() { C.sl_cuda_mover_close(m.c) }

// BlockingWorker returns the worker for batches whose calls of the driver may block, such as copies
// of memory that is not pinned: its thread makes all of these calls. Workers below it are shared;
// above it are those of GatedWorker.
func (m *Mover) BlockingWorker() int { return m.streams }

// GatedWorker returns the worker i of those for batches that wait for events, one batch at a time.
// It makes the worker when it is first needed.
func (m *Mover) GatedWorker(i int) (worker int, err error) {
	m.gates.Lock()
	defer m.gates.Unlock()
	worker = m.streams + 1 + i
	return worker, Status("open stream", int32(C.sl_cuda_gated_open(m.c, C.int(worker))))
}

// Load does what Device.Load does.
func (m *Mover) Load(ptx string, kernels []string) error {
	return result("load module", loadModule(ptx, kernels,
		func(text *C.char, names **C.char) C.int {
			return C.sl_cuda_mover_module(m.c, text, names)
		}))
}

// Submit starts a batch of copies behind events, which are CUevents: one crossing, no allocation.
// After an error nothing was started and nothing ends. serial is over 0 and unlike that of any
// earlier batch with this number.
func (m *Mover) Submit(worker, batch int, serial uint64, pieces []Piece, events []uint64) error {
	rc := C.sl_cuda_submit(m.c, C.int(worker), C.uint32_t(batch), C.uint64_t(serial),
		(*C.struct_sl_cuda_piece)(unsafe.Pointer(unsafe.SliceData(pieces))),
		C.size_t(len(pieces)), (*C.uint64_t)(unsafe.SliceData(events)), C.size_t(len(events)))
	return Status("copy", int32(rc))
}

// SubmitRun starts a batch that is one launch of a kernel.
func (m *Mover) SubmitRun(worker, batch int, serial uint64, r *Run, events []uint64) error {
	rc := C.sl_cuda_submit_run(m.c, C.int(worker), C.uint32_t(batch), C.uint64_t(serial),
		(*C.struct_sl_cuda_run)(unsafe.Pointer(r)),
		(*C.uint64_t)(unsafe.SliceData(events)), C.size_t(len(events)))
	return Status("launch kernel", int32(rc))
}

// SubmitEntries starts a batch that is a gather by the CPU, on BlockingWorker.
func (m *Mover) SubmitEntries(batch int, serial uint64, e *Entries) error {
	up := C.int(0)
	if e.Up {
		up = 1
	}
	rc := C.sl_cuda_gather(m.c, C.uint32_t(batch), C.uint64_t(serial),
		C.uint64_t(uintptr(unsafe.Pointer(unsafe.SliceData(e.Host)))), C.uint64_t(len(e.Host)),
		C.uint64_t(e.Base), C.uint64_t(e.Stride), C.uint64_t(e.Entry), indexPtr(e.List),
		C.size_t(e.Count), C.uint64_t(e.Dense), up)
	return Status("gather", int32(rc))
}

// Cancel drops the part of a batch that is not on its stream yet. It may be called before the
// Submit of that serial, and after the batch has ended.
func (m *Mover) Cancel(batch int, serial uint64) {
	C.sl_cuda_cancel(m.c, C.uint32_t(batch), C.uint64_t(serial))
}

// Follow makes a CUstream of the caller wait for the end of a batch that was started and has not
// been polled. driver.ErrNotSupported: the batch is on BlockingWorker.
func (m *Mover) Follow(batch int, stream uint64) error {
	rc := C.sl_cuda_follow(m.c, C.uint32_t(batch), C.uint64_t(stream))
	if rc == -C.EOPNOTSUPP {
		return driver.ErrNotSupported
	}
	return Status("wait on stream", int32(rc))
}

// EventDone reports whether a CUevent of the program has completed. For an event that was recorded
// on a stream under capture it returns an Error.
func (m *Mover) EventDone(event uint64) (bool, error) {
	rc := C.sl_cuda_over(m.c.context, nil, C.uint64_t(event))
	return rc == 0, result("ask for event", unlessNotReady(rc))
}

// Pending reports whether there are ends to poll. It does not cross into C.
func (e *Ends) Pending() bool { return e.ring.Head.Load() != e.ring.Tail.Load() }

// Pointer returns the struct sl_cuda_ends of e, for other C.
func (e *Ends) Pointer() unsafe.Pointer { return unsafe.Pointer(e.c) }

func indexPtr(list []uint32) *C.uint32_t {
	return (*C.uint32_t)(unsafe.Pointer(unsafe.SliceData(list)))
}

// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

/*
#cgo noescape sl_ucx_loop_move
#cgo nocallback sl_ucx_loop_move
#include <stdlib.h>
#include "loop.h"
*/
import "C"

import (
	"fmt"
	"syscall"
	"time"
	"unsafe"

	"github.com/sluicehq/sluice/driver"
)

// Loop is the least that moves pieces over UCX: a context and a worker, without a
// thread, a lock or a table of keys. It is what benchmarks stand beside the data plane.
// One goroutine at a time may use it.
type Loop struct {
	c      *C.struct_sl_ucx_loop
	mem    []byte
	remote uint64 // bytes of the peer's memory
}

// OpenLoop opens a loop in the library that Load has opened. transports and
// devices are as UCX_TLS and UCX_NET_DEVICES; "": UCX's own choice. What UCX cannot do
// on this machine is a *driver.UnavailableError.
// Implements: int sl_ucx_loop_open(const char *transports, ...)
func OpenLoop(transports, devices string) (*Loop, error) {
	var c [2]*C.char
	for i, s := range []string{transports, devices} {
		if s != "" {
			c[i] = C.CString(s)
			defer C.free(unsafe.Pointer(c[i]))
		}
	}
	var why [256]C.char
	l := &Loop{}
	if rc := C.sl_ucx_loop_open(c[0], c[1], &l.c, &why[0], C.size_t(len(why))); rc != 0 {
		return nil, unavailable(C.GoString(&why[0]), "choose transports and devices that "+
			"`ucx_info -d` lists")
	}
	return l, nil
}

// Allocate makes the memory of this side: UCX's own, which peers on this host can map,
// zeroed. A loop has one; it lives until Close.
func (l *Loop) Allocate(n uint64) ([]byte, error) {
	if n == 0 || n > 1<<40 {
		return nil, fmt.Errorf("allocate %d bytes: %w", n, driver.ErrBounds)
	}
	var base unsafe.Pointer
	if rc := C.sl_ucx_loop_allocate(l.c, C.uint64_t(n), &base); rc != 0 {
		return nil, loopError("allocate memory", rc)
	}
	l.mem = unsafe.Slice((*byte)(base), n)
	return l.mem, nil
}

// Offer says how a peer reaches the memory that Allocate made.
func (l *Loop) Offer() (Offer, error) {
	var rkey [C.SL_UCX_LOOP_RKEY_MAX]byte
	var n C.size_t
	if rc := C.sl_ucx_loop_rkey(l.c, unsafe.Pointer(&rkey[0]), &n); rc != 0 {
		return Offer{}, loopError("pack the memory's key", rc)
	}
	o := Offer{Rkey: append([]byte(nil), rkey[:n]...),
		Base: uint64(uintptr(unsafe.Pointer(&l.mem[0]))), Len: uint64(len(l.mem))}
	address := C.sl_ucx_loop_address(l.c, &n)
	o.Address = C.GoBytes(address, C.int(n))
	return o, nil
}

// Connect makes the way to a peer's memory, and does not wait for the peer. A loop has
// one peer.
func (l *Loop) Connect(o Offer) error {
	if len(o.Address) == 0 || len(o.Rkey) == 0 {
		return fmt.Errorf("connect to an offer without an address or a key: %w", driver.ErrBadToken)
	}
	address, rkey := C.CBytes(o.Address), C.CBytes(o.Rkey)
	defer C.free(address)
	defer C.free(rkey)
	if rc := C.sl_ucx_loop_connect(l.c, address, rkey, C.uint64_t(o.Base),
		C.uint64_t(o.Len)); rc != 0 {
		return loopError("connect", rc)
	}
	l.remote = o.Len
	return nil
}

// Batch checks descriptors against the two memories and keeps them. Their offsets
// count from the start of each memory, and their keys are not looked at. At most window
// pieces will be under way at once.
func (l *Loop) Batch(descs []driver.Desc, window int) (*Batch, error) {
	if len(descs) == 0 || window < 1 {
		return nil, fmt.Errorf("%d pieces, %d at once: %w", len(descs), window, driver.ErrBounds)
	}
	for i, d := range descs {
		if local := uint64(len(l.mem)); d.Local > local || d.Len > local-d.Local ||
			d.Remote > l.remote || d.Len > l.remote-d.Remote {
			return nil, &driver.PieceError{Piece: i, Err: driver.ErrBounds}
		}
	}
	return &Batch{descs: descs, loop: l, window: window}, nil
}

// Move moves a batch of this loop, one operation of UCX a piece, and returns when it has ended: a
// Write when the bytes are there. posted is the time until the last piece was posted.
// Past the limit the error is driver.ErrTimeout, and the loop is of no further use.
func (l *Loop) Move(op driver.Op, b *Batch, limit time.Duration) (posted time.Duration,
	err error) {
	if b.loop != l {
		return 0, fmt.Errorf("move a batch of another loop: %w", driver.ErrBounds)
	}
	var ns C.uint64_t
	rc := C.sl_ucx_loop_move(l.c, toRemote(op),
		(*C.struct_sl_desc)(unsafe.Pointer(unsafe.SliceData(b.descs))),
		C.size_t(len(b.descs)), C.uint32_t(b.window), C.uint64_t(limit), &ns)
	if rc != 0 {
		return 0, loopError("move", rc)
	}
	return time.Duration(ns), nil
}

// Progress moves what the peer has begun, for that long: the passive side's part.
func (l *Loop) Progress(d time.Duration) { C.sl_ucx_loop_progress(l.c, C.uint64_t(d)) }

// Close ends the loop and its memory. A peer over a socket must make progress
// meanwhile; past the limit what UCX still holds stays for the life of the process.
func (l *Loop) Close(limit time.Duration) {
	C.sl_ucx_loop_close(l.c, C.uint64_t(limit))
	l.c, l.mem = nil, nil
}

func loopError(what string, rc C.int) error {
	switch e := syscall.Errno(-rc); e {
	case syscall.ETIMEDOUT:
		return fmt.Errorf("%s in a bare loop of UCX: %w", what, driver.ErrTimeout)
	case syscall.EHOSTUNREACH:
		return fmt.Errorf("%s in a bare loop of UCX: no transport reaches the peer's memory: %w",
			what, driver.ErrPeerLost)
	default:
		return fmt.Errorf("%s in a bare loop of UCX: %w", what, e)
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

// #include "faces.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"

	"github.com/sluicehq/sluice/engine"
)

// transfer is the object of a transfer handle. Only one thread at a time may change or post it: see
// hold.
type transfer struct {
	of     *openEngine
	t      *engine.Transfer
	handle uint64
	held   atomic.Bool // a thread changes or posts it

	word   atomic.Uint64 // of sluice_transfer_watch
	queued atomic.Bool   // among the completions that were not taken
	closed bool          // guarded by endings.mu
}

var errHeld = fmt.Errorf("another thread changes or posts this transfer just now: %w",
	engine.ErrBusy)

// hold finds a transfer for a call that only one thread at a time may make. The caller calls
// release at the end. It returns errHeld if another thread holds the transfer.
func hold(h C.uint64_t) (*transfer, error) {
	t, err := transfers.get(uint64(h))
	if err != nil {
		return nil, err
	}
	if !t.held.CompareAndSwap(false, true) {
		return nil, errHeld
	}
	return t, nil
}

func (t *transfer) release() { t.held.Store(false) }

//export slgoTransferNew
func slgoTransferNew(h C.uint64_t, op C.uint32_t, route *C.struct_sluice_route, out *C.uint64_t,
	f *C.struct_slgo_fault) C.int {
	p, err := peers.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	if op != C.SLUICE_READ && op != C.SLUICE_WRITE {
		return answer(f, argument("op is %d: there are SLUICE_READ and SLUICE_WRITE", op))
	}
	by, err := routeOf(route)
	if err != nil {
		return answer(f, err)
	}
	t := &transfer{of: p.of}
	if t.t, err = p.of.NewTransfer(p.p, engine.Op(op), by); err != nil {
		return answer(f, err)
	}
	if t.handle, err = adopt(p.of, &transfers, t); err != nil {
		return answer(f, errors.Join(err, t.t.Close()))
	}
	*out = C.uint64_t(t.handle)
	return C.SLUICE_OK
}

func routeOf(route *C.struct_sluice_route) (engine.Route, error) {
	if route.flags&^C.SLUICE_DURABLE != 0 {
		return engine.Route{}, argument("sluice_route.flags is %#x: there is SLUICE_DURABLE",
			route.flags)
	}
	return engine.Route{Only: C.GoString(route.only),
		Durable: route.flags&C.SLUICE_DURABLE != 0}, nil
}

// pair finds the region and the remote of a copy that is added.
func pair(local, other C.uint64_t) (*region, *remote, error) {
	r, err := regions.get(uint64(local))
	if err != nil {
		return nil, nil, err
	}
	m, err := remotes.get(uint64(other))
	return r, m, err
}

//export slgoTransferAdd
func slgoTransferAdd(h, local, other C.uint64_t, list *C.struct_sluice_desc, count C.size_t,
	f *C.struct_slgo_fault) C.int {
	t, err := hold(h)
	if err != nil {
		return answer(f, err)
	}
	defer t.release()
	r, m, err := pair(local, other)
	if err != nil {
		return answer(f, err)
	}
	descs, err := inPlace[C.struct_sluice_desc](list, uint64(count), "descs")
	if err != nil {
		return answer(f, err)
	}
	for i := range descs {
		d := &descs[i]
		if err := t.t.Add(r.r, uint64(d.local), m.m, uint64(d.remote),
			uint64(d.length)); err != nil {
			return answer(f, fmt.Errorf("descs[%d]: %w", i, err))
		}
	}
	return C.SLUICE_OK
}

//export slgoTransferAddPages
func slgoTransferAddPages(h, local, other C.uint64_t, p *C.struct_sluice_pages,
	f *C.struct_slgo_fault) C.int {
	t, err := hold(h)
	if err != nil {
		return answer(f, err)
	}
	defer t.release()
	r, m, err := pair(local, other)
	if err != nil {
		return answer(f, err)
	}
	if p.flags != 0 {
		return answer(f, argument("sluice_pages.flags is %#x: there are none", p.flags))
	}
	if p.count == 0 || p.count > math.MaxInt32 {
		return answer(f, argument("count is %d, from 1 to %d", p.count, math.MaxInt32))
	}
	pages := engine.Pages{
		Count: int(p.count), EntryLen: uint64(p.entry_length),
		LocalBase: uint64(p.local_base), LocalStride: uint64(p.local_stride),
		RemoteBase: uint64(p.remote_base), RemoteStride: uint64(p.remote_stride),
	}
	if pages.Local, err = indices(p.local, pages.Count); err != nil {
		return answer(f, err)
	}
	if pages.Remote, err = indices(p.remote, pages.Count); err != nil {
		return answer(f, err)
	}
	return answer(f, t.t.AddPages(r.r, m.m, pages))
}

// indices returns an index list, whose memory the program keeps until the transfer is reset. NULL
// is nil.
func indices(p *C.uint32_t, count int) ([]uint32, error) {
	if p == nil {
		return nil, nil
	}
	return inPlace[uint32](p, uint64(count), "a list")
}

//export slgoTransferMessage
func slgoTransferMessage(h C.uint64_t, message *C.uint8_t, length C.size_t,
	f *C.struct_slgo_fault) C.int {
	t, err := hold(h)
	if err != nil {
		return answer(f, err)
	}
	defer t.release()
	return answer(f, t.setMessage(message, length))
}

// setMessage attaches a copy of a message.
func (t *transfer) setMessage(message *C.uint8_t, length C.size_t) error {
	b, err := inPlace[byte](message, uint64(length), "message")
	if err != nil {
		return err
	}
	return t.t.Notify(append([]byte{}, b...))
}

//export slgoPost
func slgoPost(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	t, err := hold(h)
	if err != nil {
		return answer(f, err)
	}
	err = t.t.Post()
	t.release()
	return answer(f, err)
}

//export slgoAbort
func slgoAbort(h C.uint64_t, timeout C.int64_t, f *C.struct_slgo_fault) C.int {
	t, err := transfers.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	ctx, cancel := within(timeout)
	defer cancel()
	err = t.t.Abort(ctx)
	if err == context.DeadlineExceeded {
		return C.SLUICE_PENDING
	}
	return answer(f, err)
}

//export slgoReset
func slgoReset(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	t, err := hold(h)
	if err != nil {
		return answer(f, err)
	}
	defer t.release()
	return answer(f, t.t.Reset())
}

//export slgoTransferClose
func slgoTransferClose(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	t, err := hold(h)
	if err != nil {
		return answer(f, err)
	}
	defer t.release()
	if err = t.t.Close(); err == nil {
		transfers.drop(uint64(h))
		t.of.ended.forget(t)
	}
	return answer(f, err)
}

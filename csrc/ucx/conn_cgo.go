// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

/*
#cgo noescape sl_ucx_submit
#cgo nocallback sl_ucx_submit
#include <errno.h>
#include <stdlib.h>
#include "ucx.h"
*/
import "C"

import (
	"runtime"
	"time"
	"unsafe"

	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
)

// Conn is our end of a connection. Its methods may be called by any goroutine, but
// none after Close.
type Conn struct{ c *C.struct_sl_ucx_conn }

// Connect makes our end of a connection to the worker with this address. It does not
// wait for the peer, and does not check the address: UCX trusts it.
func (c *Context) Connect(worker int, address []byte) (*Conn, error) {
	defer runtime.KeepAlive(c)
	n := &Conn{}
	p := C.CBytes(address)
	defer C.free(p)
	if rc := C.sl_ucx_connect(c.c, C.uint32_t(worker), p, &n.c); rc != 0 {
		return nil, errnoError("connect", int64(-rc))
	}
	return n, nil
}

// ID names this end in the messages of the peer: never 0, and never used again.
func (n *Conn) ID() uint64 { return uint64(C.sl_ucx_id(n.c)) }

// Bind names the peer's end of the connection, and gives the GraceNanos of the peer's context.
func (n *Conn) Bind(peer, grace uint64) {
	C.sl_ucx_bind(n.c, C.uint64_t(peer), C.uint64_t(grace))
}

// Control sends a control message to the peer: to the end that Bind has named, or to its worker
// before Bind was called.
func (n *Conn) Control(msg []byte) error {
	rc := C.sl_ucx_control(n.c, (*C.uint8_t)(unsafe.SliceData(msg)), C.size_t(len(msg)))
	if rc != 0 {
		return errnoError("send a control message", int64(-rc))
	}
	return nil
}

// Lanes returns the text, of several lines, by which UCX describes the endpoint.
func (n *Conn) Lanes() string {
	const size = 8 << 10
	p := (*C.char)(C.calloc(1, size))
	defer C.free(unsafe.Pointer(p))
	C.sl_ucx_lanes(n.c, p, size)
	return C.GoString(p)
}

// Import makes a peer's memory known to this connection.
func (n *Conn) Import(m Import) (slot uint32, err error) {
	flags := C.uint32_t(0)
	if m.ReadOnly {
		flags = C.SL_UCX_READ_ONLY
	}
	var s C.uint32_t
	rc := C.sl_ucx_import(n.c, C.uint32_t(m.Key), C.uint64_t(m.Size), C.uint64_t(m.Ticket), flags,
		&s)
	if rc != 0 {
		return 0, errnoError("import memory", int64(-rc))
	}
	return uint32(s), nil
}

// Drop forgets an import; batches under way keep it. Unknown slots are ignored.
func (n *Conn) Drop(slot uint32) { C.sl_ucx_drop(n.c, C.uint32_t(slot)) }

// The structs of package ring have the same size as those of C.
var (
	_ [C.sizeof_struct_sl_pages]byte = [unsafe.Sizeof(ring.Pages{})]byte{}
	_ [C.sizeof_struct_sl_nest]byte  = [unsafe.Sizeof(ring.Nest{})]byte{}
)

// Submit starts a batch that Batch.Check permits in one crossing, under the rules of driver.Peer.
func (n *Conn) Submit(tag uint64, b *driver.Batch) error {
	var msg *byte
	var size int
	if b.Tail == driver.NotifyTail {
		msg, size = bytesAt(b.Notify), len(b.Notify)
	}
	write := C.int(0)
	if b.Op == driver.Write {
		write = 1
	}
	var pages *C.struct_sl_pages
	var nest *C.struct_sl_nest
	var local, remote *C.uint32_t
	if p := b.Pattern; p != nil {
		form, ok := ring.PagesOf(p)
		if !ok {
			return driver.ErrBounds
		}
		pages = (*C.struct_sl_pages)(unsafe.Pointer(&form))
		if !p.Plain() {
			rest := ring.NestOf(p)
			nest = (*C.struct_sl_nest)(unsafe.Pointer(&rest))
		}
		local = (*C.uint32_t)(unsafe.SliceData(p.Local.List))
		remote = (*C.uint32_t)(unsafe.SliceData(p.Remote.List))
	}
	// Bytes are typed: cgo would look through all that lies around them for pointers.
	rc := C.sl_ucx_submit(n.c, write, C.uint64_t(tag),
		(*C.struct_sl_desc)(unsafe.Pointer(unsafe.SliceData(b.Descs))), C.size_t(len(b.Descs)),
		pages, nest, local, remote, (*C.uint8_t)(msg), C.size_t(size))
	if rc == 0 {
		return nil
	}
	return ring.Refusal(int64(rc), errnoError("submit", int64(rc)&0xffff))
}

// Notify sends a notification without a batch. driver.ErrFull: there is no room now.
func (n *Conn) Notify(msg []byte) error {
	rc := C.sl_ucx_notify(n.c, (*C.uint8_t)(bytesAt(msg)), C.size_t(len(msg)))
	return errnoError("notify", int64(-rc))
}

// noBytes stands for the bytes of a message that has none and is one all the same.
var noBytes [1]byte

// bytesAt is never NULL.
func bytesAt(msg []byte) *byte {
	if len(msg) == 0 {
		return &noBytes[0]
	}
	return unsafe.SliceData(msg)
}

// Cancel asks C to end a batch early. Unknown tags are ignored.
func (n *Conn) Cancel(tag uint64) { C.sl_ucx_cancel(n.c, C.uint64_t(tag)) }

// Help makes the worker progress until a batch has ended, as driver.Helper asks for. Once stop is
// closed it waits for nothing.
func (n *Conn) Help(tag uint64, stop <-chan struct{}) bool {
	helped := false
	for {
		once := C.int(0)
		select {
		case <-stop:
			once = 1
		default:
		}
		did := C.sl_ucx_help(n.c, C.uint64_t(tag), once)
		helped = helped || did != 0
		if did&C.SL_UCX_AGAIN == 0 || once != 0 {
			return helped
		}
	}
}

// Drain ends batches that have not begun, with ErrClosed, refuses new ones, and waits for the rest.
// ErrTimeout: after grace some are still in progress. ErrPeerLost: the peer has been silent for so
// long that End does not wait.
func (n *Conn) Drain(grace time.Duration) error {
	if rc := C.sl_ucx_drain(n.c, C.uint64_t(max(grace, 0))); rc != 0 {
		return errnoError("wait for batches", int64(-rc))
	}
	return nil
}

// End ends all batches with Closed or Lost. Messages that come later are ignored. Writes
// whose bytes may be on their way end later, unless the other end is proven to be over. It may
// be called again, with a proof.
func (n *Conn) End(status int32, proven bool) {
	over := C.int(0)
	if proven {
		over = 1
	}
	C.sl_ucx_end(n.c, C.int32_t(status), over)
}

// Silence returns how long ago the last message of the peer came, and for how long a batch or
// message has waited for the peer. Both are 0 if the connection is lost or not bound yet. heard is
// 0 also if nothing waits for the peer and its next ping is not late.
func (n *Conn) Silence() (heard, waited time.Duration) {
	var h, w C.uint64_t
	C.sl_ucx_silence(n.c, &h, &w)
	return time.Duration(h), time.Duration(w)
}

// GiveUp ends the connection as lost, because the peer is silent.
func (n *Conn) GiveUp() { C.sl_ucx_give_up(n.c) }

// Close ends the connection, waits for its batches, and frees it. UCX keeps the endpoint of a
// peer that does not read within grace, until it does, is lost, or the context closes. No other
// call may run or follow.
func (n *Conn) Close(grace time.Duration) error {
	C.sl_ucx_disconnect(n.c, C.uint64_t(max(grace, 0)))
	return nil
}

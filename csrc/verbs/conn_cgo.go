// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

/*
#cgo noescape sl_verbs_submit
#cgo nocallback sl_verbs_submit
#include <stdlib.h>
#include "verbs.h"
*/
import "C"

import (
	"fmt"
	"runtime"
	"syscall"
	"time"
	"unsafe"

	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
)

// Conn is this process's end of a connection. Its methods may be called by any goroutine, but none
// after Close.
type Conn struct {
	c       *C.struct_sl_verbs_conn
	id      uint64
	context *Context // which must outlive it
}

// Connect makes a connection without queue pairs. An initiator submits, an owner receives. credit
// is how many messages the owner takes; 0: as many as Config.NotifyMax of this context.
func (c *Context) Connect(initiator bool, credit int) (*Conn, error) {
	defer runtime.KeepAlive(c)
	n := &Conn{context: c}
	if rc := C.sl_verbs_connect(c.c, cBool(initiator), C.uint32_t(credit), &n.c); rc != 0 {
		return nil, errnoError("connect", int64(-rc))
	}
	n.id = uint64(C.sl_verbs_id(n.c))
	return n, nil
}

// ID names this end in News and Notif. It is never 0, and never used again. It may be called after
// Close, too.
func (n *Conn) ID() uint64 { return n.id }

// PairMake makes a queue pair over a rail, also in place of one that has failed. It does not wait
// for the peer. It returns driver.ErrBusy if the queue pair has not failed.
func (n *Conn) PairMake(pair, rail int) (End, error) {
	defer runtime.KeepAlive(n)
	var e C.struct_sl_verbs_end
	if rc := C.sl_verbs_pair_make(n.c, C.uint32_t(pair), C.uint32_t(rail), &e); rc != 0 {
		return End{}, errnoError("make a queue pair", int64(-rc))
	}
	end := End{QueuePair: uint32(e.queue_pair), Packet: uint32(e.packet), LID: uint16(e.lid),
		MTU: uint8(e.mtu), Reads: uint8(e.reads), LinkLayer: uint8(e.link_layer)}
	for i, b := range e.gid {
		end.GID[i] = byte(b)
	}
	return end, nil
}

// PairBegin connects a queue pair that was made to the peer's end of it. An initiator's is live
// when the peer's NIC has answered a request without bytes; that is News. It returns driver.ErrBusy
// if the requests of the failed one before it are not settled.
func (n *Conn) PairBegin(pair int, theirs End) error {
	defer runtime.KeepAlive(n)
	e := C.struct_sl_verbs_end{queue_pair: C.uint32_t(theirs.QueuePair),
		packet: C.uint32_t(theirs.Packet),
		lid:    C.uint16_t(theirs.LID), mtu: C.uint8_t(theirs.MTU), reads: C.uint8_t(theirs.Reads),
		link_layer: C.uint8_t(theirs.LinkLayer)}
	for i, b := range theirs.GID {
		e.gid[i] = C.uint8_t(b)
	}
	return errnoError("connect a queue pair", -int64(C.sl_verbs_pair_begin(n.c, C.uint32_t(pair),
		&e)))
}

// PairEnd ends a queue pair. All messages that came over it are received then. An initiator's waits
// to be settled. It returns nil where there is none, and driver.ErrUnproven if the NIC keeps the
// queue pair: bytes may still move over it, and PairEnd may be called again.
func (n *Conn) PairEnd(pair int) error {
	defer runtime.KeepAlive(n)
	return endError(int64(C.sl_verbs_pair_end(n.c, C.uint32_t(pair))))
}

// PairSettle tells C that the owner has destroyed its end of an initiator's queue pair that has
// failed or was ended, and how many messages it had seen. C posts those requests again that this
// does not prove done.
func (n *Conn) PairSettle(pair int, seen uint64) error {
	defer runtime.KeepAlive(n)
	return errnoError("settle a queue pair", -int64(C.sl_verbs_pair_settle(n.c, C.uint32_t(pair),
		C.uint64_t(seen))))
}

// Seen returns how many messages of the peer have arrived, over all pairs.
func (n *Conn) Seen() uint64 {
	defer runtime.KeepAlive(n)
	return uint64(C.sl_verbs_seen(n.c))
}

// Import makes a peer's memory known to this connection.
func (n *Conn) Import(m Import) (slot uint32, err error) {
	defer runtime.KeepAlive(n)
	flags := C.uint32_t(0)
	if m.ReadOnly {
		flags = C.SL_VERBS_READ_ONLY
	}
	if len(m.RemoteKeys) > PairsMax {
		return 0, driver.ErrBounds
	}
	var s C.uint32_t
	rc := C.sl_verbs_import(n.c, C.uint64_t(m.Base), C.uint64_t(m.Size), flags,
		(*C.uint32_t)(unsafe.SliceData(m.RemoteKeys)), C.uint32_t(len(m.RemoteKeys)), &s)
	return uint32(s), errnoError("import memory", -int64(rc))
}

// Drop forgets an import; batches under way keep it. Unknown slots are ignored.
func (n *Conn) Drop(slot uint32) {
	defer runtime.KeepAlive(n)
	C.sl_verbs_drop(n.c, C.uint32_t(slot))
}

// Expire tells C that the epoch of an import has ended: no more requests for it are posted, and
// batches that need it end with driver.ErrRevoked. Unknown slots are ignored.
func (n *Conn) Expire(slot uint32) {
	defer runtime.KeepAlive(n)
	C.sl_verbs_expire(n.c, C.uint32_t(slot))
}

// The structs of package ring have the same size as those of C.
var (
	_ [C.sizeof_struct_sl_pages]byte = [unsafe.Sizeof(ring.Pages{})]byte{}
	_ [C.sizeof_struct_sl_nest]byte  = [unsafe.Sizeof(ring.Nest{})]byte{}
)

// Submit starts a batch in one crossing, under the rules of driver.Peer. The batch is not Durable.
func (n *Conn) Submit(tag uint64, b *driver.Batch) error {
	var msg *byte // nil: no notification
	if b.Tail == driver.NotifyTail {
		msg = &noBytes
		if len(b.Notify) > 0 {
			msg = unsafe.SliceData(b.Notify)
		}
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
	n.context.noteCaller()
	// Bytes are typed: cgo would look through all that lies around them for pointers.
	rc := C.sl_verbs_submit(n.c, cBool(b.Op == driver.Write), C.uint64_t(tag),
		(*C.struct_sl_desc)(unsafe.Pointer(unsafe.SliceData(b.Descs))), C.size_t(len(b.Descs)),
		pages, nest, local, remote, (*C.uint8_t)(msg), C.size_t(len(b.Notify)))
	runtime.KeepAlive(n)
	if rc == 0 {
		return nil
	}
	return ring.Refusal(int64(rc), errnoError("submit", int64(rc)&0xffff))
}

// noBytes stands for the bytes of a notification that has none.
var noBytes byte

// Cancel ends a batch as soon as its posted requests have ended. Unknown tags are ignored.
func (n *Conn) Cancel(tag uint64) {
	defer runtime.KeepAlive(n)
	C.sl_verbs_cancel(n.c, C.uint64_t(tag))
}

// Busy reports whether any batch is under way.
func (n *Conn) Busy() bool {
	defer runtime.KeepAlive(n)
	return C.sl_verbs_busy(n.c) != 0
}

// Drain refuses new batches, ends those that are not all posted with driver.ErrClosed, and waits
// for the others. It returns driver.ErrTimeout if some have not ended after grace.
func (n *Conn) Drain(grace time.Duration) error {
	defer runtime.KeepAlive(n)
	return errnoError("wait for batches", -int64(C.sl_verbs_drain(n.c, C.uint64_t(max(grace, 0)))))
}

// End ends all queue pairs, then all batches with Closed or Lost. proved says that no request that
// was posted can land at the peer any more. Without it, batches with a write or a message that did
// not complete end with driver.ErrUnproven, too. It may be called again: the arguments of the first
// call hold. It returns driver.ErrUnproven if a NIC keeps a queue pair; then no batch has ended.
func (n *Conn) End(status int32, proved bool) error {
	defer runtime.KeepAlive(n)
	return endError(int64(C.sl_verbs_end(n.c, C.int32_t(status), cBool(proved))))
}

// Close ends the connection as Closed, and frees it. No other call may run, nor follow once it has
// returned nil. Messages that were not received stay. The error is that of End.
func (n *Conn) Close() error {
	defer runtime.KeepAlive(n)
	return endError(int64(C.sl_verbs_disconnect(n.c)))
}

// endError returns the error for the result of a C function that ends queue pairs.
func endError(rc int64) error {
	if rc == 0 || rc == -int64(syscall.ERANGE) {
		return errnoError("end a queue pair", -rc)
	}
	return fmt.Errorf("the NIC keeps a queue pair: %w: %w", driver.ErrUnproven, syscall.Errno(-rc))
}

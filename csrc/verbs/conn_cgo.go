// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

/*
#cgo noescape sl_verbs_submit
#cgo nocallback sl_verbs_submit
#cgo noescape sl_verbs_submit_pages
#cgo nocallback sl_verbs_submit_pages
#include <stdlib.h>
#include "verbs.h"
*/
import "C"

import (
	"fmt"
	"math"
	"runtime"
	"syscall"
	"time"
	"unsafe"

	"github.com/sluicehq/sluice/driver"
)

// Conn is our end of a connection. Its methods may be called by any goroutine, but
// none after Close.
type Conn struct {
	c       *C.struct_sl_verbs_conn
	id      uint64
	context *Context // which must outlive it
}

// Connect makes a connection without pairs. An initiator submits, an owner receives.
// credit is how many messages the owner takes; 0: as many as we would.
func (c *Context) Connect(initiator bool, credit int) (*Conn, error) {
	defer runtime.KeepAlive(c)
	n := &Conn{context: c}
	if rc := C.sl_verbs_connect(c.c, cBool(initiator), C.uint32_t(credit), &n.c); rc != 0 {
		return nil, errnoError("connect", int64(-rc))
	}
	n.id = uint64(C.sl_verbs_id(n.c))
	return n, nil
}

// ID names this end in News and Notif: never 0, and never used again. It may be
// asked for after Close, too.
func (n *Conn) ID() uint64 { return n.id }

// PairMake makes a queue pair over a rail, also in place of one that has failed. It does
// not wait for the peer. ErrBusy: the queue pair is there.
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

// PairBegin connects a queue pair that was made to the peer's end of it. An initiator's is live,
// and news, when the peer has answered. ErrBusy: what was under way when it failed is not settled.
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

// PairEnd ends a queue pair: what came over it is received, nothing more will be. An initiator's
// then waits to be settled. nil where there is none. driver.ErrUnproven: the NIC keeps the queue
// pair, and bytes may still move over it; PairEnd may be called again.
func (n *Conn) PairEnd(pair int) error {
	defer runtime.KeepAlive(n)
	return endError(int64(C.sl_verbs_pair_end(n.c, C.uint32_t(pair))))
}

// PairSettle says, of an initiator's queue pair that has failed or was ended, that its other end is
// gone and had seen so many messages: what that does not prove done is posted again.
func (n *Conn) PairSettle(pair int, seen uint64) error {
	defer runtime.KeepAlive(n)
	return errnoError("settle a queue pair", -int64(C.sl_verbs_pair_settle(n.c, C.uint32_t(pair),
		C.uint64_t(seen))))
}

// Seen is how many messages of the peer have arrived, over all pairs.
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

// Expire says that the epoch of an import is over: no more of it is posted, and batches that
// need it end with ErrRevoked. Unknown slots are ignored.
func (n *Conn) Expire(slot uint32) {
	defer runtime.KeepAlive(n)
	C.sl_verbs_expire(n.c, C.uint32_t(slot))
}

// Submit starts a batch in one crossing, under the rules of driver.Peer. It takes nothing
// durable.
func (n *Conn) Submit(tag uint64, b *driver.Batch) error {
	var data *byte // of the notification; nil: there is none
	if b.Tail == driver.NotifyTail {
		data = &noBytes
		if len(b.Notify) > 0 {
			data = unsafe.SliceData(b.Notify)
		}
	}
	n.context.keepBack()
	var rc C.int64_t
	if p := b.Pattern; p != nil {
		form, ok := patternForm(p)
		if !ok {
			return driver.ErrBounds
		}
		if p.Plain() {
			rc = C.sl_verbs_submit_pages(n.c, toRemote(b.Op), C.uint64_t(tag), &form, nil,
				(*C.uint32_t)(unsafe.SliceData(p.Local.List)),
				(*C.uint32_t)(unsafe.SliceData(p.Remote.List)),
				(*C.uint8_t)(data), C.size_t(len(b.Notify)))
		} else {
			nest := nestOf(p)
			rc = C.sl_verbs_submit_pages(n.c, toRemote(b.Op), C.uint64_t(tag), &form, &nest,
				(*C.uint32_t)(unsafe.SliceData(p.Local.List)),
				(*C.uint32_t)(unsafe.SliceData(p.Remote.List)),
				(*C.uint8_t)(data), C.size_t(len(b.Notify)))
		}
	} else {
		// Bytes are typed: cgo would look through all that lies around them for pointers.
		rc = C.sl_verbs_submit(n.c, toRemote(b.Op), C.uint64_t(tag),
			(*C.struct_sl_desc)(unsafe.Pointer(unsafe.SliceData(b.Descs))), C.size_t(len(b.Descs)),
			(*C.uint8_t)(data), C.size_t(len(b.Notify)))
	}
	runtime.KeepAlive(n)
	if rc == 0 {
		return nil
	}
	return refusalError(int64(rc))
}

func toRemote(op driver.Op) C.int {
	return cBool(op == driver.Write)
}

// noBytes stands for the bytes of a notification that has none.
var noBytes byte

// patternForm is a pattern without its lists. It reports false where these do not have the
// length that C takes them to have. C looks at the rest.
func patternForm(p *driver.Pattern) (form C.struct_sl_pages, ok bool) {
	form = C.struct_sl_pages{
		count: C.uint64_t(p.Count), entry: C.uint64_t(p.Run),
		local_base: C.uint64_t(p.Local.Base), remote_base: C.uint64_t(p.Remote.Base),
		local_stride: C.uint64_t(p.Local.Stride), remote_stride: C.uint64_t(p.Remote.Stride),
		local_key: C.uint32_t(p.LocalKey), remote_key: C.uint32_t(p.RemoteKey),
	}
	fits := p.Count > 0 && listFits(&p.Local, p.Count) && listFits(&p.Remote, p.Count) &&
		len(p.Loops) <= driver.LoopsMax
	return form, fits && (!p.Plain() || p.Local.First == 0 && p.Remote.First == 0)
}

// nestOf is what a pattern has that is not plain, with at most driver.LoopsMax loops.
func nestOf(p *driver.Pattern) C.struct_sl_nest {
	nest := C.struct_sl_nest{
		loops:       C.uint32_t(len(p.Loops)),
		local_first: C.uint32_t(p.Local.First), remote_first: C.uint32_t(p.Remote.First),
		local_per: C.uint32_t(p.Local.Per), remote_per: C.uint32_t(p.Remote.Per),
		local_step: C.uint64_t(p.Local.Step), remote_step: C.uint64_t(p.Remote.Step),
	}
	runs := uint64(1)
	for i, l := range p.Loops {
		nest.loop[i] = C.struct_sl_loop{
			n: C.uint32_t(l.N), local: C.uint64_t(l.Local), remote: C.uint64_t(l.Remote),
		}
		runs = min(runs*uint64(l.N), math.MaxUint32) // too many for C
	}
	nest.runs = C.uint32_t(runs)
	return nest
}

// listFits reports whether a list has a number for each slot.
func listFits(s *driver.Side, count int) bool {
	slots := uint64(count)
	if s.Per > 1 {
		slots = (uint64(s.First) + slots + uint64(s.Per) - 1) / uint64(s.Per)
	}
	return s.List == nil || uint64(len(s.List)) == slots
}

// Cancel asks for the end of a batch that is not over. Unknown tags are ignored.
func (n *Conn) Cancel(tag uint64) {
	defer runtime.KeepAlive(n)
	C.sl_verbs_cancel(n.c, C.uint64_t(tag))
}

// Busy reports whether any batch is under way.
func (n *Conn) Busy() bool {
	defer runtime.KeepAlive(n)
	return C.sl_verbs_busy(n.c) != 0
}

// Drain ends what was not posted, with ErrClosed, refuses what is new, and waits for the
// rest. ErrTimeout: after grace some is still under way.
func (n *Conn) Drain(grace time.Duration) error {
	defer runtime.KeepAlive(n)
	return errnoError("wait for batches", -int64(C.sl_verbs_drain(n.c, C.uint64_t(max(grace, 0)))))
}

// End ends all queue pairs, then all batches with Closed or Lost. proved says that nothing that was
// posted lands at the peer any more. Otherwise batches whose writes or messages did not come back
// end with driver.ErrUnproven, too. It may be called twice: what the first call says holds.
// driver.ErrUnproven: a NIC keeps a queue pair, so no batch has ended.
func (n *Conn) End(status int32, proved bool) error {
	defer runtime.KeepAlive(n)
	return endError(int64(C.sl_verbs_end(n.c, C.int32_t(status), cBool(proved))))
}

// Close ends the connection and gives it back. No other call may run, nor follow once it has
// returned nil. Messages that were not received stay. The error is that of End.
func (n *Conn) Close() error {
	defer runtime.KeepAlive(n)
	return endError(int64(C.sl_verbs_disconnect(n.c)))
}

// endError makes an error of what ending queue pairs has come to.
func endError(rc int64) error {
	if rc == 0 || rc == -int64(syscall.ERANGE) {
		return errnoError("end a queue pair", -rc)
	}
	return fmt.Errorf("the NIC keeps a queue pair: %w: %w", driver.ErrUnproven, syscall.Errno(-rc))
}

// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

/*
#cgo noescape sl_ucx_submit
#cgo nocallback sl_ucx_submit
#cgo noescape sl_ucx_submit_pages
#cgo nocallback sl_ucx_submit_pages
#include <errno.h>
#include <stdlib.h>
#include "ucx.h"
*/
import "C"

import (
	"math"
	"runtime"
	"time"
	"unsafe"

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

// Bind tells which end this one talks to, and the GraceNanos of its context.
func (n *Conn) Bind(peer, grace uint64) {
	C.sl_ucx_bind(n.c, C.uint64_t(peer), C.uint64_t(grace))
}

// Control sends a message to the control of the peer: to the end that Bind named, or
// to none in particular before that.
func (n *Conn) Control(msg []byte) error {
	rc := C.sl_ucx_control(n.c, (*C.uint8_t)(unsafe.SliceData(msg)), C.size_t(len(msg)))
	if rc != 0 {
		return errnoError("send a control message", int64(-rc))
	}
	return nil
}

// Lanes is what UCX says of the endpoint, several lines.
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

// Submit starts a batch that Batch.Check permits in one crossing, under the rules of driver.Peer.
func (n *Conn) Submit(tag uint64, b *driver.Batch) error {
	var msg *byte
	var size int
	if b.Tail == driver.NotifyTail {
		msg, size = bytesAt(b.Notify), len(b.Notify)
	}
	var rc C.int64_t
	write := C.int(0)
	if b.Op == driver.Write {
		write = 1
	}
	if p := b.Pattern; p != nil {
		form, ok := patternForm(p)
		if !ok {
			return driver.ErrBounds
		}
		var nest *C.struct_sl_nest
		if !p.Plain() {
			n := nestForm(p)
			nest = &n
		}
		rc = C.sl_ucx_submit_pages(n.c, write, C.uint64_t(tag), &form, nest,
			(*C.uint32_t)(unsafe.SliceData(p.Local.List)),
			(*C.uint32_t)(unsafe.SliceData(p.Remote.List)), (*C.uint8_t)(msg), C.size_t(size))
	} else {
		// Bytes are typed: cgo would look through all that lies around them for pointers.
		rc = C.sl_ucx_submit(n.c, write, C.uint64_t(tag),
			(*C.struct_sl_desc)(unsafe.Pointer(unsafe.SliceData(b.Descs))), C.size_t(len(b.Descs)),
			(*C.uint8_t)(msg), C.size_t(size))
	}
	if rc == 0 {
		return nil
	}
	return refusal(int64(rc))
}

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

// nestForm is what a pattern has that is not plain, with at most driver.LoopsMax loops.
func nestForm(p *driver.Pattern) C.struct_sl_nest {
	nest := C.struct_sl_nest{
		loops:       C.uint32_t(len(p.Loops)),
		local_first: C.uint32_t(p.Local.First), local_per: C.uint32_t(p.Local.Per),
		local_step:   C.uint64_t(p.Local.Step),
		remote_first: C.uint32_t(p.Remote.First), remote_per: C.uint32_t(p.Remote.Per),
		remote_step: C.uint64_t(p.Remote.Step),
	}
	runs := uint64(1)
	for i, l := range p.Loops {
		nest.loop[i] = C.struct_sl_loop{n: C.uint32_t(l.N), local: C.uint64_t(l.Local),
			remote: C.uint64_t(l.Remote)}
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

// Notify sends a notification without a batch. driver.ErrFull: there is no room now.
func (n *Conn) Notify(msg []byte) error {
	rc := C.sl_ucx_notify(n.c, (*C.uint8_t)(bytesAt(msg)), C.size_t(len(msg)))
	if rc == 0 {
		return nil
	}
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

// refusal makes an error of what submit returns.
func refusal(rc int64) error {
	switch err := errnoError("submit", rc&0xffff); err {
	case driver.ErrBounds, driver.ErrReadOnly:
		return &driver.PieceError{Piece: int(rc >> 16), Err: err}
	default:
		return err
	}
}

// Cancel asks for the end of a batch that is not over. Unknown tags are ignored.
func (n *Conn) Cancel(tag uint64) { C.sl_ucx_cancel(n.c, C.uint64_t(tag)) }

// Help moves the worker for a batch, as driver.Helper has it.
func (n *Conn) Help(tag uint64, stop <-chan struct{}) bool {
	helped := false
	for {
		did := C.sl_ucx_help(n.c, C.uint64_t(tag))
		helped = helped || did != 0
		if did&C.SL_UCX_AGAIN == 0 {
			return helped
		}
		select {
		case <-stop:
			return true
		default:
		}
	}
}

// Drain ends what has not begun, with ErrClosed, refuses what is new, and waits for the
// rest. ErrTimeout: after grace some is still under way. ErrPeerLost: the peer has been silent for
// so long that End does not wait.
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

// Silence is how long ago the peer said anything, and for how long something has waited for it.
// Both are 0 where it is lost, or not bound yet, and the first also where nothing waits and the
// next ping of the peer is not late.
func (n *Conn) Silence() (heard, waited time.Duration) {
	var h, w C.uint64_t
	C.sl_ucx_silence(n.c, &h, &w)
	return time.Duration(h), time.Duration(w)
}

// GiveUp has the peer lost for its silence.
func (n *Conn) GiveUp() { C.sl_ucx_give_up(n.c) }

// Close ends the connection, waits for its batches, and gives it back. UCX keeps the endpoint of a
// peer that does not read within grace, until it does, is lost, or the context closes. No other
// call may run or follow.
func (n *Conn) Close(grace time.Duration) error {
	C.sl_ucx_disconnect(n.c, C.uint64_t(max(grace, 0)))
	return nil
}

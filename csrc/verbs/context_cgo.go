// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

/*
#cgo nocallback sl_verbs_drive
#include <stdlib.h>
#include "verbs.h"

// Memory is named by numbers, since Go has no pointers to that of a device.
static int pin_range(struct sl_verbs_context *c, uint32_t rail, uint64_t base, uint64_t len,
		      uint32_t flags, int fd, uint64_t offset, struct sl_verbs_pin **out)
{
	struct sl_verbs_dmabuf d = {.fd = fd, .offset = offset};

	return sl_verbs_pin(c, rail, (void *)(uintptr_t)base, len, flags, &d, out);
}

static int map_range(struct sl_verbs_context *c, uint32_t key, uint64_t base, uint64_t len,
		      struct sl_verbs_pin *const *pins, uint32_t prefer)
{
	return sl_verbs_map(c, key, (void *)(uintptr_t)base, len, pins, prefer);
}
*/
import "C"

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
)

// Context holds rails, memory on them, and connections, with a thread that takes completions when
// no caller does. All methods may be called by any goroutine at any time, unless they say
// otherwise; after Close, only Poll, Arm and Receive.
type Context struct {
	c      *C.struct_sl_verbs_context
	ring   ring.Ring
	closed bool        // by Close
	driven atomic.Bool // a caller has submitted or driven since the last Arm
}

// Open opens a context without rails, over the library that Load has opened.
func Open(cfg Config) (*Context, error) {
	conf := C.struct_sl_verbs_config{
		batches: C.uint32_t(cfg.BatchesMax), notifs: C.uint32_t(cfg.NotifyMax),
		conns: C.uint32_t(cfg.ConnsMax),
		depth: C.uint32_t(cfg.Depth), slice: C.uint64_t(cfg.SliceMax),
		flight:  C.uint64_t(cfg.FlightMax),
		spin_ns: C.uint64_t(cfg.SpinNanos), stall_ns: C.uint64_t(cfg.StallNanos),
		wake_fd: C.int(cfg.WakeFD), control_fd: C.int(cfg.ControlFD),
	}
	if err := hold(); err != nil {
		return nil, err
	}
	c := &Context{}
	if rc := C.sl_verbs_open(&conf, &c.c); rc != 0 {
		release()
		return nil, errnoError("open a context", int64(-rc))
	}
	r := C.sl_verbs_ring(c.c)
	// done is aligned as the ring is
	places := unsafe.Add(unsafe.Pointer(r), C.sizeof_struct_sl_ring)
	c.ring = ring.New(unsafe.Pointer(&r.head), unsafe.Pointer(&r.tail), unsafe.Pointer(&r.armed),
		unsafe.Pointer(&r.notifs), unsafe.Pointer(&r.first_len), unsafe.Pointer(&r.due), places,
		int(r.mask)+1)
	return c, nil
}

// Close ends all connections, memory and rails. It may be called twice, but not concurrently. It
// returns driver.ErrUnproven if a NIC keeps a queue pair.
func (c *Context) Close() error {
	if c.closed {
		return nil
	}
	c.closed = true
	err := endError(int64(C.sl_verbs_close(c.c)))
	release()
	runtime.AddCleanup(c, func(p *C.struct_sl_verbs_context) { C.sl_verbs_free(p) }, c.c)
	return err
}

// Poll moves completions into done. It does not cross into C. Calls must not be concurrent.
func (c *Context) Poll(done []Done) int {
	n := c.ring.Poll(done)
	runtime.KeepAlive(c)
	return n
}

// Drive takes completions in the caller, which polls for completions and messages without pause.
// The thread pauses until Arm.
func (c *Context) Drive() {
	defer runtime.KeepAlive(c)
	if c.ring.Armed.Load() != 0 {
		return // the program is about to sleep, and the thread must take its completions
	}
	c.noteCaller()
	C.sl_verbs_drive(c.c)
}

// noteCaller records that a caller submits or drives: the thread then pauses until Arm.
func (c *Context) noteCaller() {
	if !c.driven.Load() {
		c.driven.Store(true)
	}
}

// Arm makes the next completion or message write to WakeFD, once, and reports whether there is one
// already.
func (c *Context) Arm() bool {
	defer runtime.KeepAlive(c)
	ready := c.ring.Arm()
	// After ring.Arm, so that a thread that stands back for a later caller sees the ring armed.
	if c.driven.Load() && c.driven.Swap(false) {
		C.sl_verbs_resume_thread(c.c)
	}
	return ready
}

// Receive returns the next message of a peer, or false. Calls must not be concurrent.
func (c *Context) Receive() (Notif, bool) {
	defer runtime.KeepAlive(c)
	if c.ring.Notifs.Load() == 0 {
		return Notif{}, false
	}
	notif := Notif{Data: make([]byte, c.ring.NotifLen.Load())}
	notif.Conn = uint64(C.sl_verbs_notif_take(c.c, (*C.uint8_t)(unsafe.SliceData(notif.Data))))
	return notif, notif.Conn != 0
}

// News returns the next piece of news, or false. Calls must not be concurrent.
func (c *Context) News() (News, bool) {
	defer runtime.KeepAlive(c)
	var n C.struct_sl_verbs_news
	if C.sl_verbs_news(c.c, &n) == 0 {
		return News{}, false
	}
	return News{Conn: uint64(n.conn), Kind: int(n.kind), Pair: int(n.pair), Rail: int(n.rail),
		Status: int32(n.status)}, true
}

// OpenRail opens a port of a device and returns the number of the rail. The error is a
// *driver.UnavailableError.
func (c *Context) OpenRail(cfg RailConfig) (int, error) {
	defer runtime.KeepAlive(c)
	name := C.CString(cfg.Device)
	defer C.free(unsafe.Pointer(name))
	conf := (*C.struct_sl_verbs_rail_config)(C.calloc(1, C.sizeof_struct_sl_verbs_rail_config))
	defer C.free(unsafe.Pointer(conf))
	conf.device = name
	conf.port, conf.gid, conf.mtu = C.uint8_t(cfg.Port), C.uint8_t(cfg.GID), C.uint8_t(cfg.MTU)
	conf.timeout, conf.retries = C.uint8_t(cfg.Timeout), C.uint8_t(cfg.Retries)
	conf.level, conf.traffic_class = C.uint8_t(cfg.Level), C.uint8_t(cfg.TrafficClass)
	conf.entries = C.uint16_t(max(0, min(cfg.EntriesMax, 1<<16-1)))
	var rail C.uint32_t
	var why [256]C.char
	if rc := C.sl_verbs_rail_open(c.c, conf, &rail, &why[0], C.size_t(len(why))); rc != 0 {
		return 0, &driver.UnavailableError{Backend: "rdma",
			Reason: fmt.Sprintf("port %d of device %s: %s", cfg.Port, cfg.Device,
				C.GoString(&why[0])), Fix: "choose a device and a port that `sluice doctor` " +
				"lists as active"}
	}
	return int(rail), nil
}

// Rail says what a rail can do.
func (c *Context) Rail(rail int) (Rail, error) {
	defer runtime.KeepAlive(c)
	var r C.struct_sl_verbs_rail_info
	if rc := C.sl_verbs_rail_info(c.c, C.uint32_t(rail), &r); rc != 0 {
		return Rail{}, errnoError("look at a rail", int64(-rc))
	}
	out := Rail{
		DepthMax: int(r.depth_max), SGEMax: int(r.sge_max), InlineMax: int(r.inline_max),
		MTU: int(r.mtu), DMABuf: r.dmabuf != 0,
	}
	for i, b := range r.gid {
		out.GID[i] = byte(b)
	}
	return out, nil
}

// Counters returns the counters of a rail.
func (c *Context) Counters(rail int) (Counters, error) {
	defer runtime.KeepAlive(c)
	var n C.struct_sl_verbs_counters
	if rc := C.sl_verbs_rail_counters(c.c, C.uint32_t(rail), &n); rc != 0 {
		return Counters{}, errnoError("count on a rail", int64(-rc))
	}
	return Counters{
		BytesOut: uint64(n.bytes_out), BytesIn: uint64(n.bytes_in), Requests: uint64(n.requests),
		Reposted: uint64(n.reposted), Failures: uint64(n.failures),
		InFlight: uint64(n.in_flight),
	}, nil
}

type pin struct {
	context *Context

	mu sync.Mutex
	p  *C.struct_sl_verbs_pin // nil after Close
}

// Pin makes a range known to the NIC of a rail. It may take long: call it for several rails in
// parallel. The range must stay allocated, at its address, until Close of the Pin.
func (c *Context) Pin(rail int, r Range, flags uint32) (Pin, error) {
	defer runtime.KeepAlive(c)
	p := &pin{context: c}
	rc := C.pin_range(c.c, C.uint32_t(rail), C.uint64_t(r.Addr), C.uint64_t(r.Len),
		C.uint32_t(flags), C.int(r.FD), C.uint64_t(r.Offset), &p.p)
	if rc != 0 {
		return nil, errnoError("register memory", int64(-rc))
	}
	return p, nil
}

func (p *pin) Close() error {
	defer runtime.KeepAlive(p.context)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.p == nil {
		return nil
	}
	if err := errnoError("forget memory", -int64(C.sl_verbs_unpin(p.p))); err != nil {
		return err
	}
	p.p = nil
	return nil
}

// Map makes n bytes of memory at addr known under a key, which must be free. pins has a Pin around
// them for each rail (nil: not reachable over it); prefer has a bit for each rail that suits it.
func (c *Context) Map(key uint32, addr, n uint64, pins []Pin, prefer uint32) error {
	defer runtime.KeepAlive(c)
	if len(pins) > RailsMax {
		return driver.ErrBounds
	}
	list := (**C.struct_sl_verbs_pin)(C.calloc(RailsMax,
		C.size_t(unsafe.Sizeof((*C.struct_sl_verbs_pin)(nil)))))
	defer C.free(unsafe.Pointer(list))
	for i := range pins {
		if p, there := pins[i].(*pin); there {
			unsafe.Slice(list, RailsMax)[i] = p.p
		}
	}
	rc := C.map_range(c.c, C.uint32_t(key), C.uint64_t(addr), C.uint64_t(n), list,
		C.uint32_t(prefer))
	return errnoError("map memory", -int64(rc))
}

// Unmap ends a key, with its grants. Unknown keys are ignored. It returns driver.ErrBusy if a batch
// of this context uses the memory. After an error, also where a NIC keeps a grant, the key stays,
// and Unmap may be called again.
func (c *Context) Unmap(key uint32) error {
	defer runtime.KeepAlive(c)
	return errnoError("unmap memory", -int64(C.sl_verbs_unmap(c.c, C.uint32_t(key))))
}

// Grant lets peers reach the memory over a rail, with the key that it returns and by addresses from
// at on, until Revoke. at is as far within a page as the memory is. A NIC may give the same key to
// the next grant: only other addresses keep out old requests.
func (c *Context) Grant(key uint32, rail int, at uint64, flags uint32) (remoteKey uint32,
	err error) {
	defer runtime.KeepAlive(c)
	var k C.uint32_t
	rc := C.sl_verbs_grant(c.c, C.uint32_t(key), C.uint32_t(rail), C.uint64_t(at),
		C.uint32_t(flags), &k)
	return uint32(k), errnoError("grant memory", -int64(rc))
}

// Revoke ends all grants of a key. When it returns nil, no request with a remote key of them can
// land. After an error, some queue pair of a peer that has such a key must be ended first.
func (c *Context) Revoke(key uint32) error {
	defer runtime.KeepAlive(c)
	return errnoError("revoke memory", -int64(C.sl_verbs_revoke(c.c, C.uint32_t(key))))
}

func cBool(b bool) C.int {
	if b {
		return 1
	}
	return 0
}

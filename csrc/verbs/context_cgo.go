// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

/*
#cgo nocallback sl_verbs_drive
#include <stdlib.h>
#include "verbs.h"

// Addresses of devices are none of this process, so Go has no pointers to them.
static int pin_device(struct sl_verbs_context *c, uint32_t rail, uint64_t base, uint64_t len,
		      uint32_t flags, int fd, uint64_t offset, struct sl_verbs_pin **out)
{
	struct sl_verbs_dmabuf d = {.fd = fd, .offset = offset};

	return sl_verbs_pin(c, rail, (void *)(uintptr_t)base, len, flags, &d, out);
}

static int map_device(struct sl_verbs_context *c, uint32_t key, uint64_t base, uint64_t len,
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

// Context holds rails, memory on them, and connections, with a thread that takes
// completions when no other does. All methods may be called by any goroutine at any
// time, unless they say otherwise, and none but Poll, Arm and Receive after Close.
type Context struct {
	c      *C.struct_sl_verbs_context
	ring   ring.Ring
	closed bool        // by Close
	driven atomic.Bool // since the last Arm
}

// Open opens a context without rails, in the library that Load has opened.
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

// Close ends all connections, memory and rails. It may be called twice, but not at once.
// driver.ErrUnproven: a NIC keeps a queue pair.
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

// Poll moves completions into done. It does not cross into C, and must not run
// twice at once.
func (c *Context) Poll(done []Done) int {
	n := c.ring.Poll(done)
	runtime.KeepAlive(c)
	return n
}

// Drive takes completions in the caller, which looks for completions and messages without
// pause: the thread stands back meanwhile. Arm ends that.
func (c *Context) Drive() {
	defer runtime.KeepAlive(c)
	if c.ring.Armed.Load() != 0 {
		return // about to sleep: the thread stays awake for it
	}
	c.keepBack()
	C.sl_verbs_drive(c.c)
}

// keepBack says that the thread may stand back: Arm ends that.
func (c *Context) keepBack() {
	if !c.driven.Load() {
		c.driven.Store(true)
	}
}

// Arm asks for one write to WakeFD and reports whether something is there already.
func (c *Context) Arm() bool {
	defer runtime.KeepAlive(c)
	ready := c.ring.Arm()
	// After that: a caller that makes the thread stand back from now on makes it see that a
	// sleeper is there.
	if c.driven.Load() && c.driven.Swap(false) {
		C.sl_verbs_undrive(c.c)
	}
	return ready
}

// Receive returns the next message that a peer sent with its data. It must not run
// twice at once.
func (c *Context) Receive() (Notif, bool) {
	defer runtime.KeepAlive(c)
	if c.ring.Notifs.Load() == 0 {
		return Notif{}, false
	}
	notif := Notif{Data: make([]byte, c.ring.NotifLen.Load())}
	notif.Conn = uint64(C.sl_verbs_notif_take(c.c, (*C.uint8_t)(unsafe.SliceData(notif.Data))))
	return notif, notif.Conn != 0
}

// News returns the next news, after ControlFD was written to. It must not run twice at once.
func (c *Context) News() (News, bool) {
	defer runtime.KeepAlive(c)
	var n C.struct_sl_verbs_news
	if C.sl_verbs_news(c.c, &n) == 0 {
		return News{}, false
	}
	return News{Conn: uint64(n.conn), Kind: int(n.kind), Pair: int(n.pair), Rail: int(n.rail),
		Status: int32(n.status)}, true
}

// OpenRail opens a port of a device and returns the number of the rail. What this machine
// does not have is a *driver.UnavailableError.
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
	var r C.struct_sl_verbs_rail
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

// Counters returns what was counted on a rail.
func (c *Context) Counters(rail int) (Counters, error) {
	defer runtime.KeepAlive(c)
	var n C.struct_sl_verbs_counters
	if rc := C.sl_verbs_rail_counters(c.c, C.uint32_t(rail), &n); rc != 0 {
		return Counters{}, errnoError("count on a rail", int64(-rc))
	}
	return Counters{
		BytesOut: uint64(n.bytes_out), BytesIn: uint64(n.bytes_in), Requests: uint64(n.requests),
		Again: uint64(n.again), Failures: uint64(n.failures),
		InFlight: uint64(n.in_flight),
	}, nil
}

// Pin is a range that a NIC knows for local use.
type Pin struct {
	context *Context

	mu sync.Mutex
	p  *C.struct_sl_verbs_pin // nil after Close
}

// Pin makes a range known to the NIC of a rail, which may take long: call it for several
// rails at once. The range must stay where it is until Close.
func (c *Context) Pin(rail int, mem []byte, flags uint32) (*Pin, error) {
	defer runtime.KeepAlive(c)
	p := &Pin{context: c}
	rc := C.sl_verbs_pin(c.c, C.uint32_t(rail), unsafe.Pointer(unsafe.SliceData(mem)),
		C.uint64_t(len(mem)), C.uint32_t(flags), nil, &p.p)
	if rc != 0 {
		return nil, errnoError("register memory", int64(-rc))
	}
	return p, nil
}

// PinDevice is Pin of memory of a device, which must stay allocated until Close.
func (c *Context) PinDevice(rail int, d Device, flags uint32) (*Pin, error) {
	defer runtime.KeepAlive(c)
	p := &Pin{context: c}
	rc := C.pin_device(c.c, C.uint32_t(rail), C.uint64_t(d.Addr), C.uint64_t(d.Len),
		C.uint32_t(flags), C.int(d.FD), C.uint64_t(d.Offset), &p.p)
	if rc != 0 {
		return nil, errnoError("register device memory", int64(-rc))
	}
	return p, nil
}

// Close makes the NIC forget the range. ErrBusy: a key still uses it. It is idempotent.
func (p *Pin) Close() error {
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

// Map makes memory known under a key, which must be free, with a pin for each rail
// (nil: not reachable over it); prefer has a bit for each rail that suits it.
func (c *Context) Map(key uint32, mem []byte, pins []*Pin, prefer uint32) error {
	defer runtime.KeepAlive(c)
	if len(pins) > RailsMax {
		return driver.ErrBounds
	}
	list := pinList(pins)
	defer C.free(unsafe.Pointer(list))
	rc := C.sl_verbs_map(c.c, C.uint32_t(key), unsafe.Pointer(unsafe.SliceData(mem)),
		C.uint64_t(len(mem)), list, C.uint32_t(prefer))
	return errnoError("map memory", -int64(rc))
}

// MapDevice is Map of n bytes at an address of a device, of which PinDevice made the pins.
func (c *Context) MapDevice(key uint32, addr, n uint64, pins []*Pin, prefer uint32) error {
	defer runtime.KeepAlive(c)
	if len(pins) > RailsMax {
		return driver.ErrBounds
	}
	list := pinList(pins)
	defer C.free(unsafe.Pointer(list))
	rc := C.map_device(c.c, C.uint32_t(key), C.uint64_t(addr), C.uint64_t(n), list,
		C.uint32_t(prefer))
	return errnoError("map device memory", -int64(rc))
}

// pinList is a list as C takes it, to be freed.
func pinList(pins []*Pin) **C.struct_sl_verbs_pin {
	list := (**C.struct_sl_verbs_pin)(C.calloc(RailsMax,
		C.size_t(unsafe.Sizeof((*C.struct_sl_verbs_pin)(nil)))))
	for i, p := range pins {
		if p != nil {
			unsafe.Slice(list, RailsMax)[i] = p.p
		}
	}
	return list
}

// Unmap ends a key, with its grants. Unknown keys are ignored. ErrBusy: a batch of ours works on
// the memory. After an error, also where a NIC keeps a grant, the key stays, and Unmap may be
// called again.
func (c *Context) Unmap(key uint32) error {
	defer runtime.KeepAlive(c)
	return errnoError("unmap memory", -int64(C.sl_verbs_unmap(c.c, C.uint32_t(key))))
}

// Grant lets peers reach the memory over a rail, with the key that it returns and by addresses from
// at on, until Revoke. at is as far within a page as the memory is. A NIC may give the same key to
// the next grant: other addresses keep out what was sent before.
func (c *Context) Grant(key uint32, rail int, at uint64, flags uint32) (remoteKey uint32,
	err error) {
	defer runtime.KeepAlive(c)
	var k C.uint32_t
	rc := C.sl_verbs_grant(c.c, C.uint32_t(key), C.uint32_t(rail), C.uint64_t(at),
		C.uint32_t(flags), &k)
	return uint32(k), errnoError("grant memory", -int64(rc))
}

// Revoke ends all grants of a key: when it returns nil, nothing that was begun with them
// lands any more. Otherwise some queue pair of those that use it must be ended first.
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

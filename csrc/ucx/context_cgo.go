// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

/*
#cgo CFLAGS: -O2 -std=c11 -Wall -Wextra
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "ucx.h"
#include "load.h"

static const char *sl_ucx_version(void) { return sl_ucx.ucp_get_version_string(); }
static const char *sl_ucx_say(int status) { return sl_ucx.ucs_status_string((ucs_status_t)status); }
*/
import "C"

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
)

// Context is a context of UCX with its workers, each with a thread that makes it progress.
// All methods may be called by any goroutine at any time, unless they say otherwise.
type Context struct {
	c     *C.struct_sl_ucx_context
	rings []ring.Ring
	grace uint64
	next  int // Receive's: which worker it asks first

	control [ControlMax]byte // of Control

	closed bool        // by Close
	driven atomic.Bool // since the last Arm
}

// Open opens a context in the library that Load has opened. What UCX cannot
// do on this machine is a *driver.UnavailableError.
func Open(cfg Config) (*Context, error) {
	endKept()
	conf := (*C.struct_sl_ucx_config)(C.calloc(1, C.sizeof_struct_sl_ucx_config))
	defer C.free(unsafe.Pointer(conf))
	var texts cTexts
	defer texts.free()
	text := texts.add
	if cfg.Transports != "" {
		conf.transports = text(cfg.Transports)
	}
	if cfg.Devices != "" {
		conf.devices = text(cfg.Devices)
	}
	conf.settings = settingsArray(cfg.Settings, text)
	defer C.free(unsafe.Pointer(conf.settings))
	conf.workers, conf.batches = C.uint32_t(cfg.Workers), C.uint32_t(cfg.BatchesMax)
	conf.notifs = C.uint32_t(cfg.NotifyMax)
	conf.spin_ns, conf.grace_ns = C.uint64_t(cfg.SpinNanos), C.uint64_t(cfg.GraceNanos)
	conf.wake_fd, conf.control_fd = C.int(cfg.WakeFD), C.int(cfg.ControlFD)
	c := &Context{grace: cfg.GraceNanos}
	var why [256]C.char
	if rc := C.sl_ucx_open(conf, &c.c, &why[0], C.size_t(len(why))); rc != 0 {
		return nil, library.Unavailable(C.GoString(&why[0]), "choose transports and devices that "+
			"`ucx_info -d` lists")
	}
	for i := range cfg.Workers {
		r := C.sl_ucx_ring(c.c, C.uint32_t(i))
		// done is aligned as the ring is
		places := unsafe.Add(unsafe.Pointer(r), C.sizeof_struct_sl_ring)
		c.rings = append(c.rings, ring.New(unsafe.Pointer(&r.head), unsafe.Pointer(&r.tail),
			unsafe.Pointer(&r.armed),
			unsafe.Pointer(&r.notifs), unsafe.Pointer(&r.first_len), unsafe.Pointer(&r.due), places,
			int(r.mask)+1))
	}
	return c, nil
}

// cTexts are strings of C.
type cTexts []unsafe.Pointer

func (t *cTexts) add(s string) *C.char {
	p := C.CString(s)
	*t = append(*t, unsafe.Pointer(p))
	return p
}

func (t *cTexts) free() {
	for _, p := range *t {
		C.free(p)
	}
}

// settingsArray makes the list of names and values that C reads.
func settingsArray(settings []string, text func(string) *C.char) **C.char {
	list := (**C.char)(C.calloc(C.size_t(2*len(settings)+1),
		C.size_t(unsafe.Sizeof((*C.char)(nil)))))
	slots := unsafe.Slice(list, 2*len(settings)+1)
	for i, s := range settings {
		name, value, _ := strings.Cut(s, "=")
		slots[2*i], slots[2*i+1] = text(name), text(value)
	}
	return list
}

// Poll moves completions into done. It does not cross into C, and must not run
// twice at once.
func (c *Context) Poll(done []ring.Done) int {
	n := 0
	for i := range c.rings {
		n += c.rings[i].Poll(done[n:])
	}
	runtime.KeepAlive(c)
	return n
}

// Drive makes the workers progress in the caller, which polls for completions and messages without
// pause. The threads of the workers pause until Arm.
func (c *Context) Drive() {
	defer runtime.KeepAlive(c)
	if c.rings[0].Armed.Load() != 0 {
		return // about to sleep: the threads stay awake for it
	}
	c.driven.Store(true)
	C.sl_ucx_drive(c.c)
}

// Arm makes the next completion or message write to WakeFD, once, and reports whether there is one
// already.
func (c *Context) Arm() bool {
	defer runtime.KeepAlive(c)
	if c.driven.Load() && c.driven.Swap(false) {
		defer C.sl_ucx_undrive(c.c)
	}
	ready := false
	for i := range c.rings {
		ready = c.rings[i].Arm() || ready
	}
	return ready
}

// Close ends the threads, the memories and the workers. All connections must be closed. The
// context then does nothing any more, also after ErrKept. It may be called twice, but not
// concurrently.
func (c *Context) Close() error {
	if c.closed {
		return nil
	}
	c.closed = true
	if c.end(c.grace / 2) {
		return nil
	}
	kept.Lock()
	defer kept.Unlock()
	kept.contexts = append(kept.contexts, c)
	return ErrKept
}

func (c *Context) end(grace uint64) bool {
	if C.sl_ucx_close(c.c, C.uint64_t(grace)) != 0 {
		return false
	}
	runtime.AddCleanup(c, func(p *C.struct_sl_ucx_context) { C.sl_ucx_free(p) }, c.c)
	return true
}

// kept has the contexts whose Close has returned ErrKept.
var kept struct {
	sync.Mutex
	contexts []*Context
}

// endKept tries once more to free the contexts in kept.
func endKept() {
	kept.Lock()
	defer kept.Unlock()
	kept.contexts = slices.DeleteFunc(kept.contexts, func(c *Context) bool { return c.end(0) })
}

// Address returns the address of a worker, for the Connect of a peer.
func (c *Context) Address(worker int) []byte {
	defer runtime.KeepAlive(c)
	var n C.size_t
	p := C.sl_ucx_address(c.c, C.uint32_t(worker), &n)
	return C.GoBytes(p, C.int(n))
}

// Receive returns the next message that a peer sent with its data. It must not run
// twice at once.
func (c *Context) Receive() (Notif, bool) {
	for range c.rings {
		i := c.next
		c.next = (c.next + 1) % len(c.rings)
		if c.rings[i].Notifs.Load() == 0 {
			continue
		}
		notif := Notif{Data: make([]byte, c.rings[i].NotifLen.Load())}
		notif.Conn = uint64(C.sl_ucx_take_notification(c.c, C.uint32_t(i),
			(*C.uint8_t)(unsafe.SliceData(notif.Data))))
		runtime.KeepAlive(c)
		return notif, true
	}
	runtime.KeepAlive(c)
	return Notif{}, false
}

// Control returns the next control message. It must not run twice at once.
func (c *Context) Control() (Control, bool) {
	defer runtime.KeepAlive(c)
	var l C.struct_sl_ucx_arrived_control
	if C.sl_ucx_take_control(c.c, &l, (*C.uint8_t)(&c.control[0])) == 0 {
		return Control{}, false
	}
	m := Control{Worker: int(l.worker), Conn: uint64(l.conn), Lost: l.lost != 0, Over: l.lost == 2}
	if !m.Lost {
		m.Data = slices.Clone(c.control[:l.len])
	}
	return m, true
}

// Map makes memory known under a key, which must be free. The memory must stay where
// it is until Revoke has returned nil.
func (c *Context) Map(key uint32, m Memory) error {
	defer runtime.KeepAlive(c)
	flags := C.uint32_t(0)
	if m.ReadOnly {
		flags = C.SL_UCX_READ_ONLY
	}
	landings := C.struct_sl_ucx_landings{
		inside: (*C.int64_t)(unsafe.Pointer(m.Inside)),
		phase:  (*C.int32_t)(unsafe.Pointer(m.Phase)),
	}
	rc := C.sl_ucx_map(c.c, C.uint32_t(key), unsafe.Pointer(unsafe.SliceData(m.Mem)),
		C.uint64_t(len(m.Mem)), flags,
		C.uint64_t(m.Ticket), landings, C.struct_sl_ucx_only{
			ranges: (*C.struct_sl_ucx_extent)(unsafe.Pointer(unsafe.SliceData(m.Only))),
			n:      C.uint64_t(len(m.Only)),
		})
	if rc != 0 {
		return errnoError("map memory", int64(-rc))
	}
	return nil
}

// Revoke ends a memory: no message reaches it from now on, whatever Revoke returns. When it returns
// nil, no thread of this context uses the memory, and the key is free. driver.ErrTimeout: a thread
// still uses it after the limit, for instance because it waits for a page; call Revoke again. It
// may run beside Close, and after it.
func (c *Context) Revoke(key uint32, limit time.Duration) error {
	defer runtime.KeepAlive(c)
	if C.sl_ucx_revoke(c.c, C.uint32_t(key), C.uint64_t(limit)) != 0 {
		return fmt.Errorf("a thread of UCX stands in memory: %w", driver.ErrTimeout)
	}
	return nil
}

func errnoError(what string, errno int64) error {
	e := syscall.Errno(errno)
	if err, known := ring.ErrnoErrors[e]; known {
		return err
	}
	switch e {
	case syscall.ETIMEDOUT:
		return fmt.Errorf("%s over UCX: a peer does not answer: %w", what, driver.ErrTimeout)
	case syscall.EHOSTUNREACH:
		return fmt.Errorf("%s over UCX: no transport reaches the peer: %w", what,
			driver.ErrPeerLost)
	default:
		return fmt.Errorf("%s over UCX: %w", what, e)
	}
}

func statusText(status int32) string { return C.GoString(C.sl_ucx_say(C.int(status))) }

// load opens the library and returns "", or why not and what to do.
// Implements: int sl_ucx_load(const char *path, char *why, size_t size)
func load(path string) (reason, fix string) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	var why [512]C.char
	if rc := C.sl_ucx_load(name, &why[0], C.size_t(len(why))); rc != 0 {
		return C.GoString(&why[0]), "apt-get install libucx0"
	}
	return "", ""
}

// Version names the library that Load has opened, as in "1.13.1".
func Version() string {
	if library.Loaded() != nil {
		return ""
	}
	return C.GoString(C.sl_ucx_version())
}

// Sends returns how many messages UCX has not yet put into the peer's queue. For tests.
func (n *Conn) Sends() int { return int(C.sl_ucx_sends(n.c)) }

// Elapse advances the clock of all contexts of this process, and makes this one check its limits at
// once. The others take the time for a standstill of their own. For tests.
func (c *Context) Elapse(d time.Duration) { C.sl_ucx_elapse(c.c, C.uint64_t(d)) }

// clock returns the time of that clock, in ns.
func clock() uint64 { return uint64(C.sl_ucx_now()) }

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/proc"
)

// device is a stand-in for a backend that moves between DRAM and memory of another kind of
// its own process, as cuda and posix do: that memory is memory of the host which no other
// backend is told of. It can hold its copies back.
type device struct {
	*mem.Backend
	name string
	kind driver.Kind

	alone bool // it moves to and from DRAM alone, as posix does
	hung  bool // operations end with the connection alone, as on a file of a server that is gone
	stuck bool // nor with that
	says  bool // it says when bytes would survive a loss of power

	durable atomic.Int64 // bytes written so
	plain   atomic.Int64 // batches of other writes

	mu     sync.Mutex // guards what follows
	memory map[uint64][]byte
	held   []heldCopy // in order
	hold   bool
	ended  []driver.Completion
}

type heldCopy struct {
	p      *devicePeer
	tag    uint64
	submit func() error
}

func newDevice(t testing.TB, name string, kind driver.Kind) *device {
	t.Helper()
	d, err := openDevice(name, kind)
	check(t, err)
	return d
}

func openDevice(name string, kind driver.Kind) (*device, error) {
	b, err := mem.New(mem.Config{})
	return &device{Backend: b, name: name, kind: kind, memory: map[uint64][]byte{}}, err
}

func (d *device) Caps() driver.Caps {
	c := d.Backend.Caps()
	c.Name, c.Pairs, c.MessageMax = d.name, driver.Pairs{driver.DRAM: driver.KindsOf(d.kind)}, 0
	if c.Pairs[d.kind] = driver.KindsOf(driver.DRAM, d.kind); d.alone {
		c.Pairs[d.kind] = driver.KindsOf(driver.DRAM)
	}
	c.RunsMax = 1 << 16
	return c
}

// alloc makes memory of the device's kind.
func (d *device) alloc(t testing.TB, n uint64) (seg driver.Segment, bytes []byte) {
	t.Helper()
	b, err := hostmem.Alloc(n, hostmem.Options{Purpose: "device"})
	check(t, err)
	afterClose(t, func() { _ = b.Close() })
	return d.own(b.Segment().Mem), b.Segment().Mem
}

// own takes memory for the device's.
func (d *device) own(b []byte) driver.Segment {
	at := addressOf(b)
	d.mu.Lock()
	defer d.mu.Unlock()
	seg := driver.Segment{Kind: d.kind, Len: uint64(len(b))}
	if d.kind == driver.File {
		seg.FD, seg.FileOff = 1, at
	} else {
		seg.Addr = at
	}
	d.memory[at] = b
	return seg
}

func (d *device) Register(seg driver.Segment) (driver.Memory, error) {
	if seg.Kind != d.kind {
		return d.Backend.Register(seg)
	}
	at := seg.Addr + seg.FileOff
	d.mu.Lock()
	defer d.mu.Unlock()
	for base, b := range d.memory {
		if at >= base && at+seg.Len <= base+uint64(len(b)) {
			seg.Kind, seg.Mem, seg.Addr, seg.FD, seg.FileOff = driver.DRAM, b[at-base:][:seg.Len],
				0, 0, 0
			seg.Only = nil // as most, it leaves the look to engines
			return d.Backend.Register(seg)
		}
	}
	return nil, driver.ErrBounds
}

// Connect reaches nobody but itself.
func (d *device) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	if string(addr) != string(d.Addr()) {
		return nil, driver.ErrNotSupported
	}
	p, err := d.Backend.Connect(ctx, addr)
	if err != nil {
		return nil, err
	}
	return &devicePeer{p, d}, nil
}

// Poll implements driver.Backend.
func (d *device) Poll(done []driver.Completion) (int, error) {
	d.mu.Lock()
	n := copy(done, d.ended)
	d.ended = d.ended[n:]
	d.mu.Unlock()
	if n > 0 {
		return n, nil
	}
	return d.Backend.Poll(done)
}

// keep holds copies back from here on.
func (d *device) keep() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.hold = true
}

// kept counts those that are held back.
func (d *device) kept() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.held)
}

// release lets go of what is held back.
func (d *device) release() {
	d.mu.Lock()
	held := d.held
	d.held, d.hold = nil, false
	d.mu.Unlock()
	for _, h := range held {
		if err := h.submit(); err != nil {
			d.end(h.tag, err)
		}
	}
	d.wakeEngine()
}

// drop ends what is held back, and moves none of it.
func (d *device) drop() {
	d.mu.Lock()
	held := d.held
	d.held, d.hold = nil, false
	d.mu.Unlock()
	for _, h := range held {
		d.end(h.tag, driver.ErrAborted)
	}
}

func (d *device) end(tag uint64, err error) {
	d.mu.Lock()
	d.ended = append(d.ended, driver.Completion{Tag: tag, Err: err})
	d.mu.Unlock()
	d.wakeEngine()
}

// wakeEngine wakes the engine.
func (d *device) wakeEngine() {
	if wake, err := proc.EventFromFD(d.FD()); err == nil { // else it is closed
		_ = wake.Signal()
		_ = wake.Close()
	}
}

// devicePeer carries no messages.
type devicePeer struct {
	driver.Peer
	d *device
}

func (p *devicePeer) Can() driver.Can {
	if p.d.says {
		return driver.CanPattern | driver.CanDurable
	}
	return driver.CanPattern
}

func (p *devicePeer) Submit(tag uint64, b *driver.Batch) error {
	if err := b.Check(p.Can()); err != nil {
		return err
	}
	own := driver.Batch{Op: b.Op, Descs: append([]driver.Desc(nil), b.Descs...)}
	n := uint64(0)
	if b.Pattern != nil {
		pattern := *b.Pattern
		own.Pattern, n = &pattern, pattern.Bytes()
	}
	for i := range b.Descs {
		n += b.Descs[i].Len
	}
	switch {
	case b.Durable:
		p.d.durable.Add(int64(n))
	case b.Op == driver.Write:
		p.d.plain.Add(1)
	}
	move := func() error { return p.Peer.Submit(tag, &own) }
	p.d.mu.Lock()
	if p.d.hold {
		p.d.held = append(p.d.held, heldCopy{p, tag, move})
		p.d.mu.Unlock()
		return nil
	}
	p.d.mu.Unlock()
	return move()
}

// Cancel ends what is held back.
func (p *devicePeer) Cancel(tag uint64) {
	if !p.d.hung {
		p.drop(func(h *heldCopy) bool { return h.tag == tag }, driver.ErrAborted)
	}
}

func (p *devicePeer) Close() error {
	if p.d.stuck {
		return nil
	}
	p.drop(func(h *heldCopy) bool { return h.p == p }, driver.ErrClosed)
	return p.Peer.Close()
}

func (p *devicePeer) drop(which func(*heldCopy) bool, why error) {
	p.d.mu.Lock()
	var kept, dropped []heldCopy
	for _, h := range p.d.held {
		if which(&h) {
			dropped = append(dropped, h)
		} else {
			kept = append(kept, h)
		}
	}
	p.d.held = kept
	p.d.mu.Unlock()
	for _, h := range dropped {
		p.d.end(h.tag, why)
	}
}

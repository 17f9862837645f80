// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/files"
)

// pin is host memory that io_uring knows, so that its pages are not looked up for each request. The
// zero value is memory that it does not know.
//
// The kernel then goes on with the pages that were there, so memory that others map is held where
// it is (driver.Holder), and no revoke puts fresh pages there meanwhile.
type pin struct {
	at, n   uint64
	first   int32 // place of the first of its buffers, each of bufferMax bytes
	count   int32
	release func()
}

// AddMemory implements files.Mover: it registers host memory with io_uring while Config.PinMax has
// room for it, at neighbouring places of the table. Without, transfers work as well.
func (g *ring) AddMemory(m *files.Memory, seg *driver.Segment) error {
	p := &pin{at: m.At, n: m.Size, release: func() {}}
	m.Own = p
	if m.Size > g.cfg.PinMax {
		return nil
	}
	if h, ok := seg.Shared.(driver.Holder); ok {
		release, err := h.Hold()
		if err != nil {
			return nil
		}
		p.release = release
	} else if seg.Shared != nil {
		return nil
	}
	// Not before: Hold waits for a Renew, and that for reads which end under this lock.
	g.core.Mu.Lock()
	defer g.core.Mu.Unlock()
	count := (len(seg.Mem) + bufferMax - 1) / bufferMax
	first := g.room(count)
	if first < 0 || m.Size > g.cfg.PinMax-g.pinned {
		p.release()
		return nil
	}
	p.first = int32(first)
	for off := 0; off < len(seg.Mem); off += bufferMax {
		if g.updateBuffer(first+int(p.count), seg.Mem[off:min(off+bufferMax,
			len(seg.Mem))]) != nil {
			break
		}
		g.buffers[first+int(p.count)] = true
		p.count++
	}
	switch {
	case p.count == 0:
		p.release()
		return nil
	case int(p.count) < count:
		if g.unpin(p) == nil {
			p.release()
			return nil
		}
		p.n = 0 // of no use, and held until DropMemory
	}
	g.pins[p] = struct{}{}
	g.pinned += m.Size
	return nil
}

// DropMemory implements files.Mover. What io_uring does not give up stays held.
func (g *ring) DropMemory(m *files.Memory) error {
	p := m.Own.(*pin)
	if p.count == 0 {
		return nil
	}
	g.core.Mu.Lock()
	err := g.unpin(p)
	if err == nil {
		g.pinned -= m.Size
		delete(g.pins, p)
	}
	g.core.Mu.Unlock()
	if err != nil {
		return fmt.Errorf("unpin memory: %w", err)
	}
	p.release()
	return nil
}

// holds returns the place of the buffer that all of a place in memory lies in, or -1.
func (p *pin) holds(v files.Place) int32 {
	off := v.At - p.at
	if p.count == 0 || off > p.n || v.Len > p.n-off { // it may go on in memory registered apart
		return -1
	}
	if off/bufferMax != (off+v.Len-1)/bufferMax {
		return -1
	}
	return p.first + int32(off/bufferMax)
}

// room finds neighbouring places that are free, -1 for none.
func (g *ring) room(count int) int {
	run := 0
	for i, taken := range g.buffers {
		if run++; taken {
			run = 0
		}
		if run == count && count > 0 {
			return i - count + 1
		}
	}
	return -1
}

// unpin gives places of the table back, from the last on.
func (g *ring) unpin(p *pin) error {
	for ; p.count > 0; p.count-- {
		last := int(p.first + p.count - 1)
		if err := g.updateBuffer(last, nil); err != nil {
			return err
		}
		g.buffers[last] = false
	}
	return nil
}

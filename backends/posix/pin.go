// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// pin is host memory that io_uring knows, so that its pages are not looked up for each
// request. The zero value is memory that it does not know.
//
// The kernel then goes on with the pages that were there, so memory that others map is
// held where it is (driver.Holder), and a Revoke of it by fresh pages is refused meanwhile.
type pin struct {
	mem     []byte
	first   int32 // place of the first of its buffers, each of bufferMax bytes
	count   int32
	release func()
}

// pinMemory registers host memory with io_uring while Config.PinMax has room for it.
// Without, transfers work as well.
func (b *Backend) pinMemory(seg *driver.Segment) pin {
	if seg.Len > b.cfg.PinMax {
		return pin{}
	}
	release := func() {}
	if h, ok := seg.Shared.(driver.Holder); ok {
		var err error
		if release, err = h.Hold(); err != nil {
			return pin{}
		}
	} else if seg.Shared != nil {
		return pin{}
	}
	// Not before: Hold waits for a Renew, and that for reads which end under this lock.
	b.flights.Mu.Lock()
	defer b.flights.Mu.Unlock()
	p := pin{}
	if seg.Len <= b.cfg.PinMax-b.pinned {
		p = b.mover.pin(seg.Mem)
	}
	if p.count == 0 {
		release()
		return p
	}
	p.release = release
	b.pinned += seg.Len
	return p
}

// unpin ends it, or leaves what io_uring does not give up.
func (b *Backend) unpin(p *pin) error {
	if p.count == 0 {
		return nil
	}
	b.flights.Mu.Lock()
	err := b.mover.unpin(p)
	if err == nil {
		b.pinned -= uint64(len(p.mem))
	}
	b.flights.Mu.Unlock()
	if err != nil {
		return fmt.Errorf("unpin memory: %w", err)
	}
	p.release()
	return nil
}

// holds returns the place of the buffer that all of mem lies in, or -1.
func (p *pin) holds(mem []byte) int32 {
	if p.count == 0 {
		return -1
	}
	off := addressOf(mem) - addressOf(p.mem)
	if off > uint64(len(p.mem)) || uint64(len(mem)) > uint64(len(p.mem))-off {
		return -1 // it goes on in memory that was registered apart
	}
	if off/bufferMax != (off+uint64(len(mem))-1)/bufferMax {
		return -1
	}
	return p.first + int32(off/bufferMax)
}

// pin implements mover: neighbouring places of the table, each for up to bufferMax bytes.
func (g *ring) pin(mem []byte) pin {
	count := (len(mem) + bufferMax - 1) / bufferMax
	first := g.room(count)
	if first < 0 {
		return pin{}
	}
	p := pin{mem: mem, first: int32(first)}
	for off := 0; off < len(mem); off += bufferMax {
		if g.updateBuffer(first+int(p.count), mem[off:min(off+bufferMax, len(mem))]) != nil {
			_ = g.unpin(&p) // or its places stay taken
			return pin{}
		}
		g.buffers[first+int(p.count)] = true
		p.count++
	}
	return p
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

// unpin implements mover.
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

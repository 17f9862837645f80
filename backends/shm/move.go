// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"runtime"
	"sync/atomic"

	"github.com/sluicehq/sluice/csrc"
	"github.com/sluicehq/sluice/driver"
)

// announceWorkers is the first announcement line of workers; callers of Submit
// begin at 0. Each looks for a free line from there, so they rarely meet.
const announceWorkers = announceMax / 2

// An announcement tells the owner that a copy may be under way: key + 1 in the
// low half, the direction, and a number that makes this one different from the
// next of the same key.
const (
	announceWrite = 1 << 32
	announceStep  = 1 << 33
)

func announcedKey(word uint64) (key uint32, write bool) {
	return uint32(word) - 1, word&announceWrite != 0
}

// announce claims a line.
func (p *peer) announce(key uint32, op driver.Op, hint int) *atomic.Uint64 {
	value := uint64(key) + 1 | p.hints.Add(1)*announceStep
	if op == driver.Write {
		value |= announceWrite
	}
	for i := hint; ; i++ {
		line := word(p.page, announceAt+uint64(i%announceMax)*lineBytes)
		if line.Load() == 0 && line.CompareAndSwap(0, value) { // pairs with the scan in Fence, after it ended the epoch
			return line
		}
		if i-hint >= announceMax {
			runtime.Gosched()
		}
	}
}

// move copies one piece that this process can reach. errStale means that the
// owner's pages moved: map them anew and copy the piece again.
func (p *peer) move(pc *piece, hint int) error {
	if pc.op == driver.Read {
		pc.local.enter()
		defer pc.local.leave()
	}
	m := pc.remote
	line := p.announce(m.key, pc.op, hint)
	epoch := p.table.epoch(m.key)
	if epoch.Load() != m.epoch {
		line.Store(0)
		return driver.ErrRevoked
	}
	var err error
	switch {
	case m.self != nil:
		err = pc.copySelf()
	case m.arena != nil:
		return p.moveMapped(pc, line)
	default:
		err = p.moveForeign(pc, epoch)
	}
	line.Store(0)
	if pc.op == driver.Read && epoch.Load() != m.epoch {
		return driver.ErrRevoked // an owner that did not wait for us may have changed the bytes
	}
	return err
}

// moveMapped copies to or from the peer's pages.
func (p *peer) moveMapped(pc *piece, line *atomic.Uint64) error {
	m := pc.remote
	generation := p.table.generation(m.arena.index)
	mapped := m.arena.acquire()
	if mapped == nil || mapped.generation != generation.Load() {
		line.Store(0)
		if mapped != nil {
			mapped.release()
		}
		if b := m.broken.Load(); b != nil {
			return b.err
		}
		return errStale
	}
	err := pc.copy(mapped.mem[m.off : m.off+m.size])
	line.Store(0) // an exchange on amd64: the copied bytes are out before the words below are read
	mapped.release()
	if generation.Load() != mapped.generation {
		return errStale // we may have been in pages that are nobody's any more
	}
	if pc.op == driver.Read && p.table.epoch(m.key).Load() != m.epoch {
		return driver.ErrRevoked
	}
	return err
}

// copySelf copies within this process.
func (pc *piece) copySelf() error {
	target := pc.remote.self
	if pc.op == driver.Write {
		target.enter()
		defer target.leave()
	}
	return pc.copy(target.bytes)
}

func (pc *piece) copy(remote []byte) error {
	if pc.pages != nil {
		return csrc.CopyPages(pc.op, pc.local.bytes, remote, pc.pages, pc.first, pc.n)
	}
	return csrc.CopyDescs(pc.op, pc.local.bytes, remote, pc.descs)
}

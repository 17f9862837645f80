// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"runtime"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/csrc/copy"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testpoint"
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

// How long announce looks for a line: a while without rest, and then with a rest each time. A copy
// that has one takes well under a millisecond.
const (
	announceTries = 4 * announceMax
	announceRests = 1000
	announceRest  = time.Millisecond
)

// announce claims a line; nil: the peer is closed or lost, or all lines are taken for so long that
// it has filled them itself.
func (p *peer) announce(key uint32, op driver.Op, hint int) *atomic.Uint64 {
	value := uint64(key) + 1 | p.hints.Add(1)*announceStep
	if op == driver.Write {
		value |= announceWrite
	}
	for i := range announceTries + announceRests*announceMax {
		line := word(p.page, announceAt+uint64((hint+i)%announceMax)*lineBytes)
		if line.Load() == 0 && line.CompareAndSwap(0, value) {
			return line // pairs with the scan in keepOut, after it ended the epoch
		}
		switch {
		case i < announceMax:
		case i < announceTries:
			runtime.Gosched()
		case p.gone() != nil:
			return nil
		case i%announceMax == 0:
			time.Sleep(announceRest)
		}
	}
	_ = p.sock.Close() // the reader ends by it
	return nil
}

// move copies one piece that this process can reach. errStale means that the
// owner's pages moved: map them anew and copy the piece again.
//
// Nothing of a mover lands in pages that the owner uses after a revoke:
//
//   - A mover announces, then takes the generation of the arena's pages, then looks at the
//     epoch, and copies only through a mapping of the generation that it took.
//   - Revoke ends the epoch, then looks at the announcements. A mover that it does not see
//     announces later, finds the epoch over, and copies nothing. One that goes away has
//     placed its bytes before.
//   - Of one that stays, Revoke moves the generation on, then puts fresh pages under the
//     range. If the mover found the epoch good, it did so before the epoch ended, and took
//     a generation that is older than that of the fresh pages. A mapping has the generation
//     that the arena had while its descriptors were taken, and no page moved meanwhile, so
//     the mover copies through old pages, however long it stands between two steps and
//     however often other goroutines of its process map the arena anew meanwhile.
//   - An arena's number may serve another arena after the revoke. Its generation moves on
//     then and never goes back, so a mapping of the generation that the mover took is one
//     of the arena for which it looked at the epoch: that arena's last reference is given
//     back only after the epoch has ended.
//
// In memory of this very backend there are no other pages: Revoke waits for such a mover
// until it goes away (ownCopies). Foreign memory has a gate, see writeGate.
func (p *peer) move(pc *piece, hint int) error {
	if pc.op == driver.Read {
		pc.local.enter()
		defer pc.local.leave()
	}
	m := pc.remote
	line := p.announce(m.key, pc.op, hint)
	if line == nil {
		return driver.ErrPeerLost
	}
	testpoint.At("shm: announced") // the owner may see the mover
	if m.arena != nil {
		return p.moveMapped(pc, line)
	}
	epoch := p.table.epoch(m.key)
	if epoch.Load() != m.epoch {
		line.Store(0)
		return driver.ErrRevoked
	}
	testpoint.At("shm: epoch") // the epoch was good
	var err error
	if m.self != nil {
		err = pc.copySelf()
	} else {
		err = p.moveForeign(pc, epoch)
	}
	testpoint.At("shm: copied") // the bytes are placed, the announcement stands
	line.Store(0)
	if pc.op == driver.Read && epoch.Load() != m.epoch {
		return driver.ErrRevoked // an owner that did not wait for us may have changed the bytes
	}
	return err
}

// moveMapped copies to or from the peer's pages.
func (p *peer) moveMapped(pc *piece, line *atomic.Uint64) error {
	m := pc.remote
	generation, epoch := p.table.generation(m.arena.index), p.table.epoch(m.key)
	taken := generation.Load()      // before the epoch
	testpoint.At("shm: generation") // the generation is taken
	if epoch.Load() != m.epoch {
		line.Store(0)
		return driver.ErrRevoked
	}
	testpoint.At("shm: epoch") // the epoch was good
	mapped := m.arena.acquire()
	if mapped == nil || mapped.generation != taken || m.off+m.size > uint64(len(mapped.mem)) {
		line.Store(0)
		if mapped != nil {
			mapped.release()
		}
		return m.whyBroken(p.b.clock.Now())
	}
	testpoint.At("shm: mapped") // the mapping is of that generation
	err := pc.copy(mapped.mem[m.off : m.off+m.size])
	testpoint.At("shm: copied") // the bytes are placed, the announcement stands
	line.Swap(0)                // the copied bytes are out before the words below are read
	mapped.release()
	testpoint.At("shm: left") // the generation is not looked at again yet
	if generation.Load() != taken {
		return errStale // the pages may have been old ones
	}
	if pc.op == driver.Read && epoch.Load() != m.epoch {
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
	if pc.pattern != nil {
		return copy.Runs(pc.op, pc.local.bytes, remote, pc.pattern, pc.first, pc.n, pc.way)
	}
	return copy.Descs(pc.op, pc.local.bytes, remote, pc.descs, pc.way)
}

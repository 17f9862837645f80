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

// run is a stretch of a batch between one pair of memories.
type run struct {
	local    *memory
	remote   *imported
	first, n int // descriptors, or runs of the pattern
}

// piece is what is copied between two looks at revocation: a small batch as a whole, or a part of
// a job.
type piece struct {
	run
	op      driver.Op
	descs   []driver.Desc   // nil: runs of pattern
	pattern *driver.Pattern // nil: descs
	way     copy.Way
}

// at returns descriptor i of a piece, or run i of its pattern.
func (pc *piece) at(i int) driver.Desc {
	if pc.pattern != nil {
		return copy.Run(pc.pattern, pc.first+i)
	}
	return pc.descs[i]
}

// Submit implements driver.Peer. It copies small batches itself, and queues others for the workers
// and for the goroutine that waits.
func (p *peer) Submit(tag uint64, b *driver.Batch) error {
	if err := b.Check(can); err != nil {
		return err
	}
	if err := p.enter(); err != nil {
		return err
	}
	// Nothing begins unless all of it is known and within its memory.
	bytes, err := p.check(b)

	// The completion and the message have their places before anything begins.
	var message entry
	if err == nil && !p.b.done.Take() {
		err = driver.ErrFull
	} else if err == nil && b.Tail == driver.NotifyTail {
		if message, err = p.out.reserve(b.Notify); err != nil {
			p.b.done.GiveBack()
			p.pingOwner()
		}
	}
	if err != nil {
		p.exit()
		return err
	}

	if bytes <= uint64(p.b.cfg.InlineMax) {
		if err = p.copyInline(b, copy.For(max(bytes, b.Total))); err != errStale {
			p.notify(message, err == nil)
			p.b.done.Push(tag, err) // no wake-up: the caller polls after Submit
			p.exit()
			return nil
		}
		// Pages have moved, and the owner must be asked for the new ones: a job copies all again.
	}
	p.b.queue.push(p.newJob(tag, b, message, bytes))
	return nil // step calls exit when it completes the job
}

// check looks at every descriptor and counts the bytes.
func (p *peer) check(b *driver.Batch) (bytes uint64, err error) {
	if b.Tail == driver.NotifyTail && len(b.Notify) > messageMax || len(b.Descs) > descsMax {
		return 0, driver.ErrBounds
	}
	if g := b.Pattern; g != nil {
		local, remote, err := p.resolve(b.Op, g.LocalKey, g.RemoteKey)
		if err != nil {
			return 0, err
		}
		return g.Bytes(), g.Check(uint64(len(local.bytes)), remote.size)
	}
	for i := 0; i < len(b.Descs); {
		n := stretch(b.Descs[i:])
		local, remote, err := p.resolve(b.Op, b.Descs[i].LocalKey, b.Descs[i].RemoteKey)
		if err != nil {
			return 0, err
		}
		for end := i + n; i < end; i++ {
			d := &b.Descs[i]
			if d.Len == 0 || !fits(d, uint64(len(local.bytes)), remote.size) {
				return 0, driver.ErrBounds
			}
			bytes += d.Len
		}
	}
	return bytes, nil
}

func fits(d *driver.Desc, local, remote uint64) bool {
	return d.Local <= local && d.Len <= local-d.Local &&
		d.Remote <= remote && d.Len <= remote-d.Remote
}

// stretch counts the leading descriptors between one pair of memories.
func stretch(descs []driver.Desc) int {
	n := 1
	for n < len(descs) && descs[n].LocalKey == descs[0].LocalKey &&
		descs[n].RemoteKey == descs[0].RemoteKey {
		n++
	}
	return n
}

// resolve finds both memories of a pair of keys.
func (p *peer) resolve(op driver.Op, localKey, remoteKey uint32) (*memory, *imported, error) {
	local, remote := p.b.memory(localKey), p.imported(remoteKey)
	if local == nil || remote == nil {
		return nil, nil, errUnknownKey
	}
	if op == driver.Write && remote.flags&flagReadOnly != 0 {
		return nil, nil, driver.ErrReadOnly
	}
	return local, remote, nil
}

// copyInline copies a batch in the caller's goroutine.
func (p *peer) copyInline(b *driver.Batch, way copy.Way) error {
	pc := piece{op: b.Op, pattern: b.Pattern, way: way}
	for i := 0; i < len(b.Descs) || i == 0 && pc.pattern != nil; i += pc.n {
		var err error
		if g := pc.pattern; g != nil {
			pc.n = g.Count * g.Runs()
			pc.local, pc.remote, err = p.resolve(b.Op, g.LocalKey, g.RemoteKey)
		} else {
			pc.n = stretch(b.Descs[i:])
			pc.descs = b.Descs[i : i+pc.n]
			pc.local, pc.remote, err = p.resolve(b.Op, pc.descs[0].LocalKey, pc.descs[0].RemoteKey)
		}
		if err != nil {
			return driver.ErrRevoked // it was there a moment ago: closed meanwhile
		}
		if err := p.move(&pc, 0); err != nil {
			return err
		}
	}
	return nil
}

// notify sends the message of a batch once its bytes are placed, or drops it.
func (p *peer) notify(message entry, ok bool) {
	if message.valid && p.out.publish(message, ok) {
		signal(p.event)
	}
}

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
	value := uint64(key) + 1 | p.announcedCount.Add(1)*announceStep
	if op == driver.Write {
		value |= announceWrite
	}
	for i := range announceTries + announceRests*announceMax {
		line := word(p.page, announceAt+uint64((hint+i)%announceMax)*lineBytes)
		if line.Load() == 0 && line.CompareAndSwap(0, value) {
			return line // pairs with the scan in Revoke, after it ended the epoch
		}
		switch {
		case i < announceMax:
		case i < announceTries:
			runtime.Gosched()
		case p.goneError() != nil:
			return nil
		case i%announceMax == 0:
			time.Sleep(announceRest)
		}
	}
	_ = p.sock.Close() // which ends readMessages
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
// until it goes away. Foreign memory has a gate, see writeGate.
func (p *peer) move(pc *piece, hint int) error {
	m := pc.remote
	if pc.op == driver.Read {
		pc.local.enter()
		defer pc.local.leave()
	}
	line := p.announce(m.key, pc.op, hint)
	if line == nil {
		return driver.ErrPeerLost
	}
	testpoint.At("shm: announced") // the owner may see the mover

	var generation *atomic.Uint64
	var taken uint64
	if m.arena != nil {
		generation = p.table.generation(m.arena.index)
		taken = generation.Load()       // before the epoch
		testpoint.At("shm: generation") // the generation is taken
	}
	epoch := p.table.epoch(m.key)
	if epoch.Load() != m.epoch {
		line.Store(0)
		return driver.ErrRevoked
	}
	testpoint.At("shm: epoch") // the epoch was good

	var err error
	switch {
	case m.arena != nil:
		mapped := m.arena.acquire()
		if mapped == nil {
			line.Store(0)
			return errStale
		}
		if mapped.generation != taken || m.off+m.size > uint64(len(mapped.mem)) {
			line.Store(0)
			mapped.release()
			return errStale
		}
		testpoint.At("shm: mapped") // the mapping is of that generation
		err = pc.copy(mapped.mem[m.off : m.off+m.size])
		testpoint.At("shm: copied") // the bytes are placed, the announcement stands
		line.Swap(0)                // the copied bytes are out before the words below are read
		mapped.release()
		testpoint.At("shm: left") // the generation is not looked at again yet
		if generation.Load() != taken {
			return errStale // the pages may have been old ones
		}
	default:
		if m.self == nil {
			err = p.moveForeign(pc, epoch)
		} else if pc.op == driver.Write {
			m.self.enter()
			err = pc.copy(m.self.bytes)
			m.self.leave()
		} else {
			err = pc.copy(m.self.bytes)
		}
		testpoint.At("shm: copied")
		line.Swap(0)
	}
	if pc.op == driver.Read && epoch.Load() != m.epoch {
		return driver.ErrRevoked // an owner that did not wait for us may have changed the bytes
	}
	return err
}

// copy copies to or from the bytes of the remote memory, which are here.
func (pc *piece) copy(remote []byte) error {
	if pc.pattern != nil {
		return copy.Runs(pc.op, pc.local.bytes, remote, pc.pattern, pc.first, pc.n, pc.way)
	}
	return copy.Descs(pc.op, pc.local.bytes, remote, pc.descs, pc.way)
}

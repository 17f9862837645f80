// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"github.com/sluicehq/sluice/csrc/copy"
	"github.com/sluicehq/sluice/driver"
)

// Submit implements driver.Peer.
func (p *peer) Submit(tag uint64, b *driver.Batch) error {
	if err := b.Check(can); err != nil {
		return err
	}
	if err := p.enter(); err != nil {
		return err
	}
	err := p.accept(tag, b)
	if err != nil {
		p.exit()
	}
	return err
}

// accept checks a batch, takes what it needs and copies it or queues it.
// Preconditions: entered; stays so when it returns nil, until the completion.
func (p *peer) accept(tag uint64, b *driver.Batch) error {
	bytes, err := p.check(b)
	if err != nil {
		return err
	}
	if !p.b.done.Take() {
		return driver.ErrFull
	}
	t := tail{kind: b.Tail}
	if b.Tail == driver.NotifyTail {
		if t.entry, err = p.out.reserve(b.Notify); err != nil {
			p.b.done.GiveBack()
			p.suspect()
			return err
		}
	}
	if bytes > uint64(p.b.cfg.InlineMax) || !p.inline(tag, b, &t, bytes) {
		p.enqueue(tag, b, t, bytes)
	}
	return nil
}

// tail is what follows the bytes of a batch.
type tail struct {
	kind  driver.Tail
	entry entry // that a notification has in the ring
}

// endTail sends the tail of a batch once its bytes are placed, or drops it.
func (p *peer) endTail(t *tail, ok bool) {
	if t.kind == driver.NotifyTail && p.out.show(t.entry, ok) {
		signal(p.event)
	}
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
	return within(d.Local, d.Len, local) && within(d.Remote, d.Len, remote)
}

func within(off, n, size uint64) bool { return off <= size && n <= size-off }

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

// inline copies in the caller and completes. It reports false when that cannot
// be done without waiting; what it copied by then is copied again.
func (p *peer) inline(tag uint64, b *driver.Batch, t *tail, bytes uint64) bool {
	var err error
	way := copy.For(bytes)
	if g := b.Pattern; g != nil {
		err = p.inlineRun(b, nil, g.LocalKey, g.RemoteKey, g.Count*g.Runs(), way)
	}
	for i := 0; i < len(b.Descs) && err == nil; {
		n := stretch(b.Descs[i:])
		err = p.inlineRun(b, b.Descs[i:i+n], b.Descs[i].LocalKey, b.Descs[i].RemoteKey, n, way)
		i += n
	}
	if err == errStale {
		return false
	}
	p.endTail(t, err == nil)
	p.b.done.Push(tag, err) // no wake-up: the caller polls after Submit
	p.exit()
	return true
}

func (p *peer) inlineRun(
	b *driver.Batch, descs []driver.Desc, localKey, remoteKey uint32, n int,
	way copy.Way,
) error {
	local, remote, err := p.resolve(b.Op, localKey, remoteKey)
	if err != nil {
		return driver.ErrRevoked // it was there a moment ago: closed meanwhile
	}
	return p.move(&piece{run: run{local: local, remote: remote, n: n}, op: b.Op,
		descs: descs, pattern: b.Pattern, way: way}, 0)
}

// enqueue makes a job of a batch.
func (p *peer) enqueue(tag uint64, b *driver.Batch, t tail, bytes uint64) {
	j := p.b.jobs.get()
	j.mu.Lock()
	j.peer, j.op, j.tag, j.tail = p, b.Op, tag, t
	j.live, j.cancelled, j.helped, j.stale, j.waits, j.err = true, false, false, false, nil, nil
	if j.patterned = b.Pattern != nil; j.patterned {
		j.pattern = *b.Pattern
		j.pattern.Loops = append(j.loops[:0], b.Pattern.Loops...) // the caller's may change
		j.addRun(p, j.pattern.LocalKey, j.pattern.RemoteKey, 0, j.pattern.Count*j.pattern.Runs())
	}
	j.descs = append(j.descs[:0], b.Descs...)
	for i := 0; i < len(j.descs); {
		n := stretch(j.descs[i:])
		j.addRun(p, j.descs[i].LocalKey, j.descs[i].RemoteKey, i, n)
		i += n
	}
	j.bytes, j.way = bytes, copy.For(bytes)
	j.rewind()
	j.held = 1
	j.mu.Unlock()
	p.b.queue.push(j)
}

// addRun adds a stretch and keeps its import alive until the job ends.
func (j *job) addRun(p *peer, localKey, remoteKey uint32, first, n int) {
	local, remote := p.b.memory(localKey), p.use(remoteKey)
	if local == nil || remote == nil {
		j.err = driver.ErrRevoked
	}
	j.runs = append(j.runs, run{local, remote, first, n})
}

// at returns descriptor i of a piece, or run i of its pattern.
func (pc *piece) at(i int) driver.Desc {
	if pc.pattern != nil {
		return copy.Run(pc.pattern, pc.first+i)
	}
	return pc.descs[i]
}

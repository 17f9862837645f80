// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"github.com/sluicehq/sluice/driver"
)

// batch is what one Submit carries.
type batch struct {
	op    driver.Op
	tag   uint64
	descs []driver.Desc
	pages *driver.Pages
	msg   []byte // nil: none
	bytes uint64
	note  note
}

// Submit implements driver.Peer.
func (p *peer) Submit(op driver.Op, tag uint64, descs []driver.Desc) error {
	return p.submit(&batch{op: op, tag: tag, descs: descs})
}

// SubmitNotify implements driver.Notifier.
func (p *peer) SubmitNotify(op driver.Op, tag uint64, descs []driver.Desc, msg []byte) error {
	if msg == nil {
		msg = []byte{}
	}
	return p.submit(&batch{op: op, tag: tag, descs: descs, msg: msg})
}

// SubmitPages implements driver.Pager.
func (p *peer) SubmitPages(op driver.Op, tag uint64, pages *driver.Pages, msg []byte) error {
	return p.submit(&batch{op: op, tag: tag, pages: pages, msg: msg})
}

func (p *peer) submit(t *batch) error {
	if err := p.enter(); err != nil {
		return err
	}
	err := p.accept(t)
	if err != nil {
		p.exit()
	}
	return err
}

// accept checks a batch, takes what it needs and copies it or queues it.
// Preconditions: entered; stays so when it returns nil, until the completion.
func (p *peer) accept(t *batch) error {
	if err := p.check(t); err != nil {
		return err
	}
	if !p.b.done.Take() {
		return driver.ErrFull
	}
	if t.msg != nil {
		var err error
		if t.note, err = p.reserveNote(t.msg); err != nil {
			p.b.done.GiveBack()
			return err
		}
	}
	if t.bytes > uint64(p.b.cfg.InlineMax) || !p.inline(t) {
		p.enqueue(t)
	}
	return nil
}

// check looks at every descriptor and counts the bytes.
func (p *peer) check(t *batch) error {
	if t.op != driver.Read && t.op != driver.Write {
		return driver.ErrNotSupported
	}
	if len(t.msg) > messageMax {
		return driver.ErrBounds
	}
	if g := t.pages; g != nil {
		local, remote, err := p.resolve(t.op, g.LocalKey, g.RemoteKey)
		if err != nil {
			return err
		}
		t.bytes = g.Bytes()
		return g.Check(uint64(len(local.bytes)), remote.size)
	}
	if len(t.descs) > descsMax || len(t.descs) == 0 && t.msg == nil {
		return driver.ErrBounds
	}
	for i := 0; i < len(t.descs); {
		n := stretch(t.descs[i:])
		local, remote, err := p.resolve(t.op, t.descs[i].LocalKey, t.descs[i].RemoteKey)
		if err != nil {
			return err
		}
		for end := i + n; i < end; i++ {
			d := &t.descs[i]
			if d.Len == 0 || !within(d.Local, d.Len, uint64(len(local.bytes))) || !within(d.Remote, d.Len, remote.size) {
				return driver.ErrBounds
			}
			t.bytes += d.Len
		}
	}
	return nil
}

func within(off, n, size uint64) bool { return off <= size && n <= size-off }

// stretch counts the leading descriptors between one pair of memories.
func stretch(descs []driver.Desc) int {
	n := 1
	for n < len(descs) && descs[n].LocalKey == descs[0].LocalKey && descs[n].RemoteKey == descs[0].RemoteKey {
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
func (p *peer) inline(t *batch) bool {
	var err error
	if t.pages != nil {
		err = p.inlineRun(t, nil, t.pages.LocalKey, t.pages.RemoteKey, t.pages.Count)
	}
	for i := 0; i < len(t.descs) && err == nil; {
		n := stretch(t.descs[i:])
		err = p.inlineRun(t, t.descs[i:i+n], t.descs[i].LocalKey, t.descs[i].RemoteKey, n)
		i += n
	}
	if err == errStale {
		return false
	}
	p.endNote(t.note, err == nil)
	p.b.done.Push(t.tag, err) // no wake-up: the caller polls after Submit
	p.exit()
	return true
}

func (p *peer) inlineRun(t *batch, descs []driver.Desc, localKey, remoteKey uint32, n int) error {
	local, remote, err := p.resolve(t.op, localKey, remoteKey)
	if err != nil {
		return driver.ErrRevoked // it was there a moment ago: closed meanwhile
	}
	return p.move(&piece{run: run{local: local, remote: remote, n: n}, op: t.op, descs: descs, pages: t.pages}, 0)
}

// enqueue makes a job of a batch.
func (p *peer) enqueue(t *batch) {
	j := p.b.jobs.get()
	j.mu.Lock()
	j.peer, j.op, j.tag, j.note = p, t.op, t.tag, t.note
	j.live, j.cancelled, j.helped, j.stale, j.waits, j.err = true, false, false, false, nil, nil
	j.paged = t.pages != nil
	if j.paged {
		j.pages = *t.pages
		j.addRun(p, t.pages.LocalKey, t.pages.RemoteKey, 0, t.pages.Count)
	}
	j.descs = append(j.descs[:0], t.descs...)
	for i := 0; i < len(j.descs); {
		n := stretch(j.descs[i:])
		j.addRun(p, j.descs[i].LocalKey, j.descs[i].RemoteKey, i, n)
		i += n
	}
	j.bytes = t.bytes
	j.rewind()
	j.held = 1
	j.mu.Unlock()
	p.b.queue.push(j)
}

// addRun notes a stretch and keeps its import alive until the job ends.
func (j *job) addRun(p *peer, localKey, remoteKey uint32, first, n int) {
	local, remote := p.b.memory(localKey), p.use(remoteKey)
	if local == nil || remote == nil {
		j.err = driver.ErrRevoked
	}
	j.runs = append(j.runs, run{local, remote, first, n})
}

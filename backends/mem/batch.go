// SPDX-License-Identifier: Apache-2.0

package mem

import (
	"fmt"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// can has the bits of driver.Peer.Can for every peer.
const can = driver.CanPattern | driver.CanNotify

// job is a batch that a worker copies. New makes all jobs; they are reused.
type job struct {
	p      *peer
	op     driver.Op
	tag    uint64
	work   cursor
	descs  []driver.Desc // a copy for work, since the caller may change its own after Submit
	loops  [driver.LoopsMax]driver.Loop
	views  []view
	notify *session.Notification
	cancel atomic.Pointer[error]
}

// Can implements driver.Peer.
func (p *peer) Can() driver.Can { return can }

// Submit implements driver.Peer.
func (p *peer) Submit(tag uint64, b *driver.Batch) error {
	if err := b.Check(can); err != nil {
		return err
	}
	p.entry.RLock()
	defer p.entry.RUnlock()
	if p.closed {
		return driver.ErrClosed
	}
	if p.to.closed.Load() {
		return driver.ErrPeerLost
	}
	var few [4]view // most batches name one pair of memories
	bytes, views, err := p.check(b, few[:0])
	if err != nil {
		return err
	}
	if !p.from.reserve() {
		return driver.ErrFull
	}
	n, err := p.sender.Reserve(b)
	if err != nil {
		p.from.reserved.Add(-1)
		return err
	}
	if bytes > uint64(p.from.cfg.InlineMax) {
		p.hand(tag, b, bytes, views, n)
		return nil
	}
	work := newCursor(b, bytes)
	err = copyAll(b.Op, &work, views, nil)
	p.sender.Post(n, err)
	p.from.complete(tag, err)
	return nil
}

// hand queues a batch for the workers.
func (p *peer) hand(tag uint64, b *driver.Batch, bytes uint64, views []view,
	n *session.Notification) {
	j := p.from.takeJob()
	j.p, j.op, j.tag, j.notify = p, b.Op, tag, n
	j.cancel.Store(nil)
	j.views = append(j.views[:0], views...)
	j.work = newCursor(b, bytes)
	j.descs = append(j.descs[:0], b.Descs...)
	j.work.descs = j.descs
	j.work.pattern.Loops = j.loops[:copy(j.loops[:], j.work.pattern.Loops)]
	p.mu.Lock()
	p.flying[tag] = j
	p.unfinished++
	p.mu.Unlock()
	p.from.jobs <- j
}

// takeJob returns a free job. There always is one: there are as many jobs as slots of done, and the
// caller has reserved a slot.
func (b *Backend) takeJob() *job {
	b.freeMu.Lock()
	defer b.freeMu.Unlock()
	j := b.free[len(b.free)-1]
	b.free = b.free[:len(b.free)-1]
	return j
}

func (b *Backend) giveJob(j *job) {
	b.freeMu.Lock()
	defer b.freeMu.Unlock()
	b.free = append(b.free, j)
}

func (b *Backend) worker() {
	defer b.workers.Done()
	for j := range b.jobs {
		j.run()
		b.signal()
	}
}

func (j *job) run() {
	p, tag := j.p, j.tag
	err := copyAll(j.op, &j.work, j.views, &j.cancel)
	clear(j.views)
	j.work = cursor{}
	p.sender.Post(j.notify, err)
	p.mu.Lock()
	delete(p.flying, tag)
	p.mu.Unlock()
	p.from.giveJob(j) // before complete, after which Poll may free the slot for another batch
	p.from.complete(tag, err)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.unfinished--; p.unfinished == 0 {
		p.idle.Broadcast()
	}
}

// check validates the whole batch, so that an invalid batch copies nothing. It returns the number
// of bytes, and the memories of the batch in order: the batch keeps using these when their keys
// are dropped meanwhile.
func (p *peer) check(b *driver.Batch, views []view) (bytes uint64, _ []view, err error) {
	if b.Tail == driver.NotifyTail && len(b.Notify) > p.from.cfg.MessageMax {
		return 0, nil, fmt.Errorf("notification of %d bytes, at most %d: %w",
			len(b.Notify), p.from.cfg.MessageMax, driver.ErrBounds)
	}
	if b.Pattern != nil {
		v, err := p.view(b.Op, b.Pattern.LocalKey, b.Pattern.RemoteKey)
		if err != nil {
			return 0, nil, err
		}
		err = b.Pattern.Check(uint64(len(v.local.seg.Mem)), v.remote.seg.Len)
		if err == nil && !v.remote.seg.Only.HasRemote(b.Pattern) {
			err = driver.ErrBounds
		}
		return b.Pattern.Bytes(), append(views, v), err
	}
	for i := range b.Descs {
		d := &b.Descs[i]
		if n := len(views); n == 0 || !views[n-1].isOf(d) {
			v, err := p.view(b.Op, d.LocalKey, d.RemoteKey)
			if err != nil {
				return 0, nil, &driver.PieceError{Piece: i, Err: err}
			}
			views = append(views, v)
		}
		if err := views[len(views)-1].check(d); err != nil {
			return 0, nil, &driver.PieceError{Piece: i, Err: err}
		}
		bytes += d.Len
	}
	return bytes, views, nil
}

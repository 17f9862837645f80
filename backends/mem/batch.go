// SPDX-License-Identifier: Apache-2.0

package mem

import (
	"fmt"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/letters"
)

// job is a batch that a worker copies. Jobs are made at the start and reused.
type job struct {
	p      *peer
	op     driver.Op
	tag    uint64
	descs  []driver.Desc // a copy: the caller's may change
	views  []view
	letter *letters.Letter
	cancel atomic.Pointer[error]
}

// Submit implements driver.Peer.
func (p *peer) Submit(op driver.Op, tag uint64, descs []driver.Desc) error {
	return p.submit(op, tag, descs, nil, nil)
}

// SubmitPages implements driver.Pager.
func (p *peer) SubmitPages(op driver.Op, tag uint64, pages *driver.Pages, msg []byte) error {
	return p.submit(op, tag, nil, pages, letters.Message(msg))
}

// SubmitNotify implements driver.Notifier.
func (p *peer) SubmitNotify(op driver.Op, tag uint64, descs []driver.Desc, msg []byte) error {
	if msg == nil {
		msg = []byte{}
	}
	return p.submit(op, tag, descs, nil, letters.Message(msg))
}

// SubmitCount implements driver.Counter.
func (p *peer) SubmitCount(tag uint64, descs []driver.Desc, pages *driver.Pages, counter uint32) error {
	if counter >= driver.CountersMax {
		return driver.ErrBounds
	}
	return p.submit(driver.Write, tag, descs, pages, letters.Count(counter))
}

func (p *peer) submit(op driver.Op, tag uint64, descs []driver.Desc, pages *driver.Pages, l *letters.Letter) error {
	p.entry.RLock()
	defer p.entry.RUnlock()
	if p.closed {
		return driver.ErrClosed
	}
	if p.to.closed.Load() {
		return driver.ErrPeerLost
	}
	var few [4]view // most batches name one pair of memories
	bytes, views, err := p.check(op, descs, pages, few[:0])
	if err != nil {
		return err
	}
	if l.Len() > p.from.cfg.MessageMax {
		return fmt.Errorf("notification of %d bytes, at most %d: %w", l.Len(), p.from.cfg.MessageMax, driver.ErrBounds)
	}
	if !p.from.take() {
		return driver.ErrFull
	}
	if err := p.letters.Promise(l); err != nil {
		p.from.taken.Add(-1)
		return err
	}
	if bytes > uint64(p.from.cfg.InlineMax) || pages != nil {
		p.hand(op, tag, descs, pages, views, l, bytes)
		return nil
	}
	err = copyAll(op, descs, views, nil)
	p.letters.Post(l, err)
	p.from.complete(tag, err)
	return nil
}

// hand gives a batch to a worker, or runs it here in the memory of a job if it
// is small.
func (p *peer) hand(op driver.Op, tag uint64, descs []driver.Desc, pages *driver.Pages, views []view, l *letters.Letter, bytes uint64) {
	j := p.from.takeJob()
	j.p, j.op, j.tag, j.letter = p, op, tag, l
	j.cancel.Store(nil)
	j.views = append(j.views[:0], views...)
	j.descs = append(j.descs[:0], descs...)
	for i := range pageCount(pages) {
		j.descs = append(j.descs, pages.Desc(i))
	}
	p.mu.Lock()
	p.flying[tag] = j
	p.unfinished++
	p.mu.Unlock()
	if bytes <= uint64(p.from.cfg.InlineMax) {
		j.run()
	} else {
		p.from.jobs <- j
	}
}

// takeJob returns a job that is free: there are as many as places in done, of
// which the caller holds one.
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

func pageCount(pages *driver.Pages) int {
	if pages == nil {
		return 0
	}
	return pages.Count
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
	err := copyAll(j.op, j.descs, j.views, &j.cancel)
	clear(j.views)
	p.letters.Post(j.letter, err)
	p.mu.Lock()
	delete(p.flying, tag)
	p.mu.Unlock()
	p.from.giveJob(j) // before its place in done comes free
	p.from.complete(tag, err)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.unfinished--; p.unfinished == 0 {
		p.idle.Broadcast()
	}
}

// check validates the whole batch, so that what cannot work starts nothing. It
// returns the bytes and the memories that the batch looks at, in order: those
// stay known to it when their keys are dropped.
func (p *peer) check(op driver.Op, descs []driver.Desc, pages *driver.Pages, views []view) (bytes uint64, _ []view, err error) {
	if op != driver.Read && op != driver.Write {
		return 0, nil, fmt.Errorf("%v: %w", op, driver.ErrNotSupported)
	}
	if pages != nil {
		v, err := p.look(op, pages.LocalKey, pages.RemoteKey)
		if err != nil {
			return 0, nil, err
		}
		return pages.Bytes(), append(views, v), pages.Check(uint64(len(v.local)), v.remote.m.seg.Len)
	}
	for i := range descs {
		d := &descs[i]
		if n := len(views); n == 0 || !views[n-1].shows(d) {
			v, err := p.look(op, d.LocalKey, d.RemoteKey)
			if err != nil {
				return 0, nil, &driver.PieceError{Piece: i, Err: err}
			}
			views = append(views, v)
		}
		v := &views[len(views)-1]
		if err := d.Check(uint64(len(v.local)), v.remote.m.seg.Len); err != nil {
			return 0, nil, &driver.PieceError{Piece: i, Err: err}
		}
		bytes += d.Len
	}
	return bytes, views, nil
}

// view is a pair of memories. Neighbouring descriptors mostly name the same, so
// it is looked up only when the keys change.
type view struct {
	localKey, remoteKey uint32
	local               []byte
	remote              *remote
}

func (v *view) shows(d *driver.Desc) bool {
	return v.localKey == d.LocalKey && v.remoteKey == d.RemoteKey
}

func (p *peer) look(op driver.Op, localKey, remoteKey uint32) (view, error) {
	local := p.from.memory(localKey)
	if local == nil {
		return view{}, fmt.Errorf("local key %d: %w", localKey, driver.ErrBounds)
	}
	p.mu.RLock()
	defer p.mu.RUnlock()
	r := p.imports.At(remoteKey)
	if r == nil {
		return view{}, fmt.Errorf("remote key %d: %w", remoteKey, driver.ErrBounds)
	}
	if op == driver.Write && r.m.seg.ReadOnly {
		return view{}, driver.ErrReadOnly
	}
	return view{localKey, remoteKey, local.seg.Mem, r}, nil
}

// copyAll copies descriptors that check has passed, a piece under each gate.
func copyAll(op driver.Op, descs []driver.Desc, views []view, cancel *atomic.Pointer[error]) error {
	var off uint64 // done of descs[i]
	for i := 0; i < len(descs); {
		if cancel != nil {
			if why := cancel.Load(); why != nil {
				return *why
			}
		}
		if !views[0].shows(&descs[i]) {
			views = views[1:]
		}
		v := &views[0]
		v.remote.m.gate.RLock()
		if v.remote.m.epoch != v.remote.epoch {
			v.remote.m.gate.RUnlock()
			return &driver.PieceError{Piece: i, Err: driver.ErrRevoked}
		}
		for room := uint64(pieceMax); i < len(descs) && room > 0 && v.shows(&descs[i]); {
			n := min(descs[i].Len-off, room)
			copyPiece(op, v, &descs[i], off, n)
			room -= n
			if off += n; off == descs[i].Len {
				i, off = i+1, 0
			}
		}
		v.remote.m.gate.RUnlock()
	}
	return nil
}

func copyPiece(op driver.Op, v *view, d *driver.Desc, off, n uint64) {
	local := v.local[d.Local+off:][:n]
	remote := v.remote.m.seg.Mem[d.Remote+off:][:n]
	if op == driver.Write {
		copy(remote, local)
	} else {
		copy(local, remote)
	}
}

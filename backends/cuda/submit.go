// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"

	"github.com/sluicehq/sluice/csrc"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/inbox"
)

// Can implements driver.Peer.
func (p *peer) Can() driver.Can {
	if p.far != nil {
		return driver.CanPattern
	}
	return driver.CanPattern | driver.CanNotify | driver.CanCount
}

// Submit implements driver.Peer.
func (p *peer) Submit(tag uint64, b *driver.Batch) error {
	if err := b.Check(p.Can()); err != nil {
		return err
	}
	p.entry.RLock()
	defer p.entry.RUnlock()
	switch {
	case p.closed:
		return driver.ErrClosed
	case p.gone():
		return driver.ErrPeerLost
	case b.Tail == driver.NotifyTail && len(b.Notify) > p.from.cfg.MessageMax:
		return fmt.Errorf("notification of %d bytes, at most %d: %w",
			len(b.Notify), p.from.cfg.MessageMax, driver.ErrBounds)
	}
	j := p.from.take(p, tag)
	if j == nil {
		return driver.ErrFull
	}
	scratch := p.from.borrow()
	err := j.begin(b, &scratch)
	p.from.lend(scratch)
	return err
}

// begin checks and starts a batch, or undoes all.
func (j *job) begin(b *driver.Batch, pieces *[]csrc.CUDAPiece) error {
	p := j.p
	err := j.check(b, pieces)
	var n *inbox.Notification
	if err == nil {
		n, err = p.sender.Reserve(b)
	}
	if err != nil {
		j.undo()
		return err
	}
	if len(b.Descs) == 0 && b.Pattern == nil {
		j.give()
		p.sender.Post(n, nil)
		j.b.complete(driver.Completion{Tag: j.tag})
		return nil
	}
	j.notify = n
	heeded := j.heeded()
	if heeded {
		j.b.ends.Heed(1)
	}
	p.unfinished.Add(1)
	if err = j.start(*pieces); err == nil {
		return nil // and j may be another batch by now
	}
	p.unfinished.Add(-1)
	if heeded {
		j.b.ends.Heed(-1)
	}
	p.sender.Post(n, err)
	j.undo()
	return err
}

// check validates the whole batch, so that what cannot work starts nothing, and makes it pieces, or
// what a kernel or a processor needs.
func (j *job) check(b *driver.Batch, pieces *[]csrc.CUDAPiece) error {
	if b.Pattern != nil {
		return j.checkPattern(b.Op, b.Pattern, pieces)
	}
	for i := range b.Descs {
		d := &b.Descs[i]
		if n := len(j.views); n == 0 || !j.views[n-1].shows(d) {
			switch err := j.look(b.Op, d.LocalKey, d.RemoteKey); err {
			case nil:
			case driver.ErrFull: // of no piece: try again
				return err
			default:
				return &driver.PieceError{Piece: i, Err: err}
			}
		}
		v := &j.views[len(j.views)-1]
		if err := d.Check(v.local.seg.Len, v.remote.m.seg.Len); err != nil {
			return &driver.PieceError{Piece: i, Err: err}
		}
		v.add(pieces, b.Op, d, i)
		if err := j.gateOf(v, d); err != nil {
			return err
		}
	}
	return nil
}

// add makes a descriptor a piece, or a part of the one before.
func (v *view) add(pieces *[]csrc.CUDAPiece, op driver.Op, d *driver.Desc, index int) {
	dst, src := v.remote.m.base+d.Remote, v.local.base+d.Local
	if op == driver.Read {
		dst, src = src, dst
	}
	if n := len(*pieces); n > 0 {
		last := &(*pieces)[n-1]
		if last.Dst+last.Len == dst && last.Src+last.Len == src && last.Way == v.way {
			last.Len += d.Len
			return
		}
	}
	*pieces = append(*pieces, csrc.CUDAPiece{Dst: dst, Src: src, Len: d.Len, Way: v.way, Index: uint32(index)})
}

// start puts the batch on a stream, or on the list of the patient one.
func (j *job) start(pieces []csrc.CUDAPiece) error {
	j.b.starting.RLock()
	defer j.b.starting.RUnlock()
	j.show()
	m, number := j.dev.mover, j.number
	if g := j.gather; g.Count > 0 {
		j.written.Store(true)
		return m.SubmitEntries(number, &g)
	}
	lane, err := j.lane()
	if err != nil {
		return err
	}
	run, events := j.place != nil, j.events
	j.written.Store(true) // from here on it may be another batch
	if run {
		return m.SubmitRun(lane, number, &j.run, events)
	}
	return m.Submit(lane, number, pieces, events)
}

func (j *job) lane() (lane int, err error) {
	switch {
	case j.slow && len(j.events) > 0:
		return 0, fmt.Errorf("memory that is not pinned cannot wait for an event (Explain says why it is not): %w", driver.ErrNotSupported)
	case j.slow:
		return j.dev.mover.Patient(), nil
	case len(j.events) > 0:
		j.gate, lane, err = j.dev.gatedLane()
		if err != nil {
			j.gate = -1
		}
		return lane, err
	}
	j.shared = j.dev.lane()
	return j.shared, nil
}

// borrow returns room for pieces, which a batch needs only until it is on a stream.
func (b *Backend) borrow() []csrc.CUDAPiece {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := len(b.scratch); n > 0 {
		s := b.scratch[n-1]
		b.scratch = b.scratch[:n-1]
		return s[:0]
	}
	return make([]csrc.CUDAPiece, 0, 64)
}

// scratchMax is how many are kept: as many as submit at once, mostly.
const scratchMax = 8

func (b *Backend) lend(s []csrc.CUDAPiece) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.scratch) < scratchMax {
		b.scratch = append(b.scratch, s)
	}
}

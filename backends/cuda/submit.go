// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// Can implements driver.Peer.
func (p *peer) Can() driver.Can {
	if p.far != nil {
		return driver.CanPattern
	}
	return driver.CanPattern | driver.CanNotify
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
	if p.from.closed.Load() { // Poll looks at taken behind closed: it may have said ErrClosed
		j.undo()
		return driver.ErrClosed
	}
	s := p.from.borrow()
	err := j.begin(b, s)
	p.from.lend(s)
	return err
}

// begin checks and starts a batch, or undoes all.
func (j *job) begin(b *driver.Batch, s *scratch) error {
	p := j.p
	err := j.check(b, s)
	var n *session.Notification
	if err == nil {
		n, err = p.sender.Reserve(b)
	}
	if err != nil {
		j.undo()
		return err
	}
	if len(b.Descs) == 0 && b.Pattern == nil {
		backend, c := j.b, driver.Completion{Tag: j.tag}
		j.give() // and it may be another batch by now
		p.sender.Post(n, nil)
		backend.complete(c)
		return nil
	}
	j.notify = n
	heeded := j.heeded()
	if heeded {
		j.b.ends.Heed(1)
	}
	// Counted first: an owner that closes waits for the batch, or is seen to be gone.
	p.unfinished.Add(1)
	if p.gone() {
		err = driver.ErrPeerLost
	} else if err = j.start(s.pieces); err == nil {
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
func (j *job) check(b *driver.Batch, s *scratch) error {
	if b.Pattern != nil {
		return j.checkPattern(b.Op, b.Pattern, s)
	}
	for i := range b.Descs {
		d := &b.Descs[i]
		n := len(j.views)
		joins := n > 0 && j.views[n-1].shows(d)
		if !joins {
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
		v.add(&s.pieces, b.Op, d, i, joins)
		if err := j.gateOf(v, d); err != nil {
			return err
		}
	}
	return nil
}

// add makes a descriptor a piece, or a part of the one before, which it joins only where that
// is of the same view: the driver takes no copy across two allocations, or two ranges that were
// pinned one by one, though one ends where the other begins.
func (v *view) add(pieces *[]gpu.Piece, op driver.Op, d *driver.Desc, index int, joins bool) {
	dst, src := v.remote.m.base+d.Remote, v.local.base+d.Local
	if op == driver.Read {
		dst, src = src, dst
	}
	if n := len(*pieces); joins && n > 0 {
		last := &(*pieces)[n-1]
		if last.Dst+last.Len == dst && last.Src+last.Len == src {
			last.Len += d.Len
			return
		}
	}
	*pieces = append(*pieces, gpu.Piece{Dst: dst, Src: src, Len: d.Len, Way: v.way,
		Index: uint32(index)})
}

// start puts the batch on a stream, or on the list of the patient one.
func (j *job) start(pieces []gpu.Piece) error {
	j.b.starting.RLock()
	defer j.b.starting.RUnlock()
	worker, err := j.worker()
	if err != nil {
		return err
	}
	serial, err := j.show()
	if err != nil {
		return err
	}
	parked.At(spotShown)
	err = j.launch(worker, serial, pieces)
	parked.At(spotLaunched)
	return err
}

// launch hands a job that is shown to C. Once C has begun it, it may be another batch.
func (j *job) launch(worker int, serial uint64, pieces []gpu.Piece) (err error) {
	m, number, events, g, run := j.dev.mover, j.number, j.events, j.gather, j.place != nil
	j.serial.Store(serial) // as it is: finish loads it, and is ordered behind this
	switch {
	case g.Count > 0:
		err = m.SubmitEntries(number, serial, &g)
	case run:
		err = m.SubmitRun(worker, number, serial, &j.run, events)
	default:
		err = m.Submit(worker, number, serial, pieces, events)
	}
	if err != nil {
		j.hide()
	}
	return err
}

func (j *job) worker() (worker int, err error) {
	switch {
	case j.slow && len(j.events) > 0:
		return 0, fmt.Errorf("memory that is not pinned cannot wait for an event (Explain says "+
			"why it is not): %w", driver.ErrNotSupported)
	case j.slow || j.gather.Count > 0:
		return j.dev.mover.Patient(), nil
	case len(j.events) > 0:
		j.gate, worker, err = j.dev.gatedWorker()
		if err != nil {
			j.gate = -1
		}
		return worker, err
	}
	j.shared = j.dev.worker()
	return j.shared, nil
}

// scratch is room that a batch needs only until it is on a stream.
type scratch struct {
	pieces []gpu.Piece
	runs   []driver.Desc // of one entry of a pattern
}

func (b *Backend) borrow() *scratch {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := len(b.scratch); n > 0 {
		s := b.scratch[n-1]
		b.scratch = b.scratch[:n-1]
		s.pieces = s.pieces[:0]
		return s
	}
	return &scratch{pieces: make([]gpu.Piece, 0, 64)}
}

// scratchMax is how many are kept: as many as submit at once, mostly.
const scratchMax = 8

func (b *Backend) lend(s *scratch) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.scratch) < scratchMax {
		b.scratch = append(b.scratch, s)
	}
}

// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"github.com/sluicehq/sluice/csrc/cufile"
	"github.com/sluicehq/sluice/driver"
)

// request is one read or write with cuFile, or about to be. Requests are made at the start. All is
// guarded by flights.Mu.
type request struct {
	slot    uint32
	j       *job // nil: free
	f       *file
	write   bool
	edge    bool // a write of less than whole blocks
	mem     *memory
	local   uint64 // in the memory
	off     uint64 // in the file
	n, done uint64 // bytes
	asked   uint64 // of those, in this try
	first   cursor // in the items of the job
	retries int
	ending  bool // it is to be cancelled: its thread need not begin
}

// cut makes the next request of a job: of one descriptor or a part of it, or of several that touch
// on both sides. It returns nil when that has to wait until others have ended.
func (b *Backend) cut(j *job) *request {
	it := &j.Items[j.At.Item]
	v := &j.Views[it.View]
	f, off := v.Remote.Extent.file, v.Remote.Extent.off+it.Remote+j.At.Off
	// so that what follows begins with a whole block
	next, n := j.reach(uint64(b.cfg.PieceMax) - off%blockBytes)
	write, edge := j.Op == driver.Write, false
	if write {
		first := n
		if first, edge = wholeBlocks(off, n); first < n {
			next, n = j.reach(first)
		}
		if !f.mayWrite(j, edge) {
			return nil
		}
		if b.blocked(f, edge, off, n) {
			f.askTurn(j, edge)
			return nil
		}
		f.endTurn(j)
	}
	// The pages stay in place while cuFile writes there.
	if s := v.Local.Extent.shared; s != nil && !write && !b.flights.Admit(s) {
		return nil
	}
	r := b.free[len(b.free)-1]
	b.free = b.free[:len(b.free)-1]
	*r = request{slot: r.slot, j: j, f: f, write: write, edge: edge, mem: v.Local, local: it.Local +
		j.At.Off, off: off, n: n, first: j.At}
	b.mover.Cancel(r.slot, false)
	j.At = next
	return r
}

// wholeBlocks says how many bytes of a write go first: those up to a block, which are an edge, or
// whole blocks.
func wholeBlocks(off, n uint64) (first uint64, edge bool) {
	begin := (off + blockBytes - 1) &^ (blockBytes - 1)
	switch end := (off + n) &^ (blockBytes - 1); {
	case begin >= end:
		return n, true // none in it: less than two
	case begin > off:
		return begin - off, true
	default:
		return end - begin, false
	}
}

// reach says how far a request goes that begins at the cursor, for at most so many bytes.
func (j *job) reach(most uint64) (next cursor, n uint64) {
	next = j.At
	for {
		it := &j.Items[next.Item]
		left := it.Len - next.Off
		if n+left > most {
			next.Off += most - n
			return next, most
		}
		n, next = n+left, cursor{Item: next.Item + 1}
		if next.Item == len(j.Items) {
			return next, n
		}
		after := &j.Items[next.Item]
		if after.View != it.View || after.Local != it.Local+it.Len ||
			after.Remote != it.Remote+it.Len || n == most {
			return next, n
		}
	}
}

// mayWrite reports whether no other job waits for the other kind of write to this file to end.
func (f *file) mayWrite(j *job, edge bool) bool {
	return f.turn == nil || f.turn == j || f.turnEdge == edge
}

// askTurn keeps more of the other kind from beginning, until this job has begun what it waits with.
func (f *file) askTurn(j *job, edge bool) {
	if f.turn == nil {
		f.turn, f.turnEdge = j, edge
	}
}

func (f *file) endTurn(j *job) {
	if f.turn == j {
		f.turn = nil
	}
}

// blocked reports whether a write has to wait for one that is under way: of the other kind, since
// edges go through the page cache, whose pages may be larger than a block, and whole blocks past
// it; or in a block that both touch, which also keeps pieces of a batch that lie over each other in
// order.
func (b *Backend) blocked(f *file, edge bool, off, n uint64) bool {
	from, to := off&^(blockBytes-1), off+n+blockBytes-1
	for i := range b.requests {
		r := &b.requests[i]
		if r.j == nil || !r.write || !r.f.id.SameFile(f.id) {
			continue
		}
		if r.edge != edge {
			return true
		}
		if r.off&^(blockBytes-1) < to&^(blockBytes-1) &&
			from < (r.off+r.n+blockBytes-1)&^(blockBytes-1) {
			return true
		}
	}
	return false
}

// launch puts what is left of a request into the next crossing.
func (b *Backend) launch(r *request) {
	base, offset := r.mem.Extent.base(r.local + r.done)
	r.asked = r.n - r.done
	c := cufile.Request{Handle: r.f.handle, Base: base, Offset: offset, At: r.off + r.done,
		Len:  r.asked,
		Slot: r.slot, FD: int32(r.f.plain), Device: uint16(r.mem.Extent.device)}
	switch {
	case r.edge && r.mem.Kind == driver.HBM:
		c.Kind = cufile.EdgeOfDevice
	case r.edge:
		c.Kind = cufile.EdgeOfHost
	case r.write:
		c.Kind = cufile.Write
	}
	b.out.list = append(b.out.list, c)
}

func (b *Backend) newCrossing() *crossing {
	return &crossing{make([]cufile.Request, 0, b.cfg.Depth)}
}

// takeCrossing returns what is to be handed over, nil for nothing, and has another one filled.
//
// Preconditions: mu is held.
func (b *Backend) takeCrossing() *crossing {
	if len(b.out.list) == 0 {
		return nil
	}
	full := b.out
	b.sparing.Lock()
	defer b.sparing.Unlock()
	if n := len(b.spare); n > 0 {
		b.out, b.spare = b.spare[n-1], b.spare[:n-1]
	} else {
		b.out = b.newCrossing()
	}
	return full
}

// hand crosses into C.
func (b *Backend) hand(p *crossing) {
	b.mover.Put(p.list)
	p.list = p.list[:0]
	b.sparing.Lock()
	defer b.sparing.Unlock()
	b.spare = append(b.spare, p)
}

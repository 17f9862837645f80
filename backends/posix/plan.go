// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/memfault"
)

// place is where a job stands: the rest of a piece, in memory and in its file.
type place struct {
	local *extent
	f     *file
	mem   []byte
	off   uint64 // in the file
}

// place looks up a cursor.
func (j *job) place(c cursor) place {
	p := &j.Items[c.Item]
	v := &j.Views[p.View]
	local, remote := &v.Local.Extent, &v.Remote.Extent
	mem := local.mem[p.Local+c.Off:][:p.Len-c.Off]
	return place{local, remote.file, mem, remote.off + p.Remote + c.Off}
}

// step moves the cursor by n bytes within its piece, or to the next one.
func (j *job) step(p *place, n uint64) {
	if n == uint64(len(p.mem)) {
		j.At = cursor{Item: j.At.Item + 1}
		return
	}
	j.At.Off += n
}

// whole says which part of a place goes straight between the disk and memory: n bytes
// after the first skip, of whole blocks. A part of a piece must be worth it.
func (p *place) whole() (skip, n uint64) {
	size := uint64(len(p.mem))
	if !p.f.mayPast() {
		return size, 0
	}
	mask := p.f.block - 1
	skip = -p.off & mask
	if skip >= size {
		return size, 0
	}
	n = (size - skip) &^ mask
	if n == 0 || n < size && n < splitMin || addressOf(p.mem[skip:])&(p.f.align-1) != 0 {
		return size, 0
	}
	return skip, n
}

// cut makes the next request of a job. It returns nil when that has to wait until
// others have ended.
func (b *Backend) cut(j *job) *request {
	p := j.place(j.At)
	skip, whole := p.whole()
	straight := skip == 0 && whole > 0
	write := j.Op == driver.Write
	if write && !b.mayWrite(j, &p, straight) {
		return nil
	}
	shared := p.local.shared
	if shared != nil && !write && !b.flights.Admit(shared) {
		return nil
	}
	r := b.free[len(b.free)-1]
	b.free = b.free[:len(b.free)-1]
	r.begin(j, p.f, p.off)
	if shared != nil && !write {
		r.shared = append(r.shared, shared)
	}
	if write {
		r.kind = writeFrom
	}
	switch {
	case straight:
		b.cutWhole(r, j, p, whole)
	case write || !p.f.mayPast():
		b.cutCached(r, j, p, skip)
	default:
		b.cutBounced(r, j, p, skip)
	}
	r.last = j.At
	return r
}

// mayWrite keeps the kinds of write to an inode apart in time, and pieces of one batch that
// lie over each other.
func (b *Backend) mayWrite(j *job, p *place, straight bool) bool {
	if j.At.Off == 0 && j.Flying > 0 && j.At.Item > 0 && p.off < j.high {
		return false
	}
	n, mine := p.f.inode, cached
	if straight {
		mine = direct
	}
	if n.waiting[1-mine] > 0 || n.turn != nil && n.turn != j && n.turnTo != mine {
		return false
	}
	if n.writing[1-mine] > 0 {
		if n.turn == nil {
			n.turn, n.turnTo = j, mine
		}
		return false
	}
	if n.turn == j {
		n.turn = nil
	}
	return true
}

// took notes what a request has taken of a place.
func (j *job) took(p *place, n uint64) {
	j.high = max(j.high, p.off+n)
	j.step(p, n)
}

// next returns the following place if it lies in the same file and begins at off.
func (j *job) next(f *file, off uint64) (place, bool) {
	if j.At.Off > 0 || j.At.Item == len(j.Items) {
		return place{}, false
	}
	p := j.place(j.At)
	return p, p.f == f && p.off == off
}

// cutWhole takes whole blocks straight from or to memory, and further ones that follow
// in the file.
func (b *Backend) cutWhole(r *request, j *job, p place, n uint64) {
	r.past = true
	pin := p.local.pin
	r.fixed = pin.holds(p.mem[:min(n, uint64(b.cfg.PieceMax))])
	for ok := true; ok; {
		n = min(n, uint64(b.cfg.PieceMax)-r.n)
		if n == 0 || !r.enter(p.local) || !r.add(p.mem[:n]) {
			break
		}
		j.took(&p, n)
		if p, ok = j.next(p.f, r.off+r.n); ok {
			var skip uint64
			skip, n = p.whole()
			ok = skip == 0 && n > 0
		}
	}
	if len(r.iov) > 1 || r.n > uint64(b.cfg.PieceMax) || r.fixed >= 0 &&
		pin.holds(bytesOf(&r.iov[0])) != r.fixed {
		r.fixed = -1
	}
	r.need = r.n
}

// cutCached takes bytes through the page cache, up to where whole blocks begin, and what
// follows in the file. A read also takes what lies between two of its pieces, if that is
// less than a request costs.
func (b *Backend) cutCached(r *request, j *job, p place, n uint64) {
	const gapMax = 4 << 10 // copied in less time than a call takes
	for ok := true; ok; {
		n = min(n, uint64(b.cfg.PieceMax)-r.n)
		if n == 0 || !r.add(p.mem[:n]) {
			break
		}
		j.took(&p, n)
		if j.At.Off > 0 || j.At.Item == len(j.Items) {
			break
		}
		following := j.place(j.At)
		end := r.off + r.n
		ok = following.f == p.f && following.off >= end && following.off-end <= gapMax
		gap := following.off - end
		if p = following; !ok || r.n+gap >= uint64(b.cfg.PieceMax) ||
			gap > 0 && (r.kind != readInto || len(r.iov) > iovecsMax-2) {
			break
		}
		var whole uint64
		n, whole = p.whole()
		if ok = (whole == 0 || n > 0) && r.enter(p.local); ok && gap > 0 {
			ok = r.add(r.buffer[:gap])
		}
	}
	r.need = r.n
}

// cutBounced takes the blocks that pieces lie in into the buffer: those that are no further
// apart than Config.GapMax, up to where whole blocks begin.
func (b *Backend) cutBounced(r *request, j *job, p place, n uint64) {
	mask := p.f.block - 1
	r.past, r.bounce = true, true
	r.off = p.off &^ mask
	limit := r.off + bounceBytes
	end := p.off
	for {
		n = min(n, limit-p.off)
		j.took(&p, n)
		end = max(end, p.off+n)
		if j.At.Off > 0 || j.At.Item == len(j.Items) || n == 0 {
			break
		}
		following := j.place(j.At)
		if following.f != p.f || following.off < r.off || following.off >= limit ||
			b.cfg.GapMax < 0 || following.off > end+uint64(b.cfg.GapMax) {
			break
		}
		p = following
		var whole uint64
		if n, whole = p.whole(); whole > 0 && n == 0 || !r.enter(p.local) {
			break
		}
	}
	r.need = end - r.off
	size := (r.need + mask) &^ mask
	r.fixed = b.mover.fixedBuffers()
	r.add(r.buffer[:size])
}

// scatter copies what came into the buffer to where it belongs.
func (r *request) scatter() (err error) {
	defer memfault.Catch(&err, memfault.Begin())
	j := r.j
	for c := r.first; c != r.last; {
		p := j.place(c)
		n := uint64(len(p.mem))
		if c.Item == r.last.Item {
			n = r.last.Off - c.Off
		}
		copy(p.mem[:n], r.buffer[p.off-r.off:])
		if c.Item == r.last.Item {
			return nil
		}
		c = cursor{Item: c.Item + 1}
	}
	return nil
}

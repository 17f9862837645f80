// SPDX-License-Identifier: Apache-2.0

package files

import (
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// place is the rest of an item from a cursor on: n bytes, in memory and in the file.
type place struct {
	local *Memory
	f     *File
	at    uint64 // address in memory
	off   uint64 // offset in the file
	n     uint64 // bytes
}

// place returns the rest of the item at a cursor.
func (j *job) place(c cursor) place {
	i := &j.items[c.item]
	v := &j.views[i.view]
	return place{v.local, v.remote.File, v.local.At + i.local + c.off,
		v.remote.off + i.remote + c.off, i.n - c.off}
}

// directPart returns the part of a place that can bypass the page cache: n bytes, in whole blocks,
// after the first skip bytes. If no part can, n is 0 and skip is the length of the place. That is
// also so if the part is shorter than both the place and SplitMin: it is not worth a request.
func (c *Core) directPart(j *job, p *place) (skip, n uint64) {
	if !p.f.CanDirect() {
		return p.n, 0
	}
	if c.AnyReads && j.op == driver.Read {
		return 0, p.n
	}
	mask := p.f.Block - 1
	skip = -p.off & mask
	if skip >= p.n {
		return p.n, 0
	}
	n = (p.n - skip) &^ mask
	if n == 0 || n < p.n && n < c.SplitMin || (p.at+skip)&(p.f.Align-1) != 0 {
		return p.n, 0
	}
	return skip, n
}

// cut makes the next request of a job, hands it to the Mover, and moves the job's cursor past it.
// It returns false if the job must wait for other requests to end.
//
// There are three kinds of request: (1) consecutive whole blocks of a file, directly from or to the
// program's memory; (2) bytes through the page cache; (3) a read, into the request's buffer, of the
// blocks that contain the items. Each kind has a loop that adds items until the request is as long
// as it may be (n is 0), the next item does not fit it (ok is false), or that item needs a request
// of another kind.
func (c *Core) cut(j *job) bool {
	p := j.place(j.at)
	skip, blocks := c.directPart(j, &p) // bytes before the whole blocks, and in them
	direct := skip == 0 && blocks > 0   // the place begins with whole blocks
	if isPlain := j.op == driver.Write || !p.f.CanDirect(); !direct && isPlain {
		if err := p.f.plain(); err != nil {
			c.fail(j, &driver.PieceError{Piece: int(j.items[j.at.item].index),
				Err: &driver.FileError{Op: j.op.String(), Name: p.f.Name(), Off: int64(p.off),
					Err: err}})
			return false
		}
	}
	kind := Read
	if j.op == driver.Write {
		kind = Write
		if !j.mayWrite(&p, direct) {
			return false
		}
	} else if p.local.shared != nil && !c.mayEnter(p.local.shared) {
		return false
	}
	r := c.free[len(c.free)-1]
	c.free = c.free[:len(c.free)-1]
	r.begin(kind, j)
	r.File, r.Off, r.Memory, r.first = p.f, p.off, p.local, j.at
	if kind == Read && p.local.shared != nil {
		r.shared = append(r.shared, p.local.shared)
	}
	switch {
	case direct: // (1)
		r.Direct = true
		// End at a block boundary, so that the next request can begin with a whole block.
		limit := c.PieceMax - p.off&(p.f.Block-1)
		for n, ok := blocks, true; ok; {
			n = min(n, limit-r.N)
			if n == 0 || !r.enter(p.local) || !r.add(p.at, n, c.PlacesMax) {
				break
			}
			j.advance(&p, n)
			if p, ok = c.following(j, r); ok {
				skip, n = c.directPart(j, &p)
				ok = skip == 0 && n > 0 && p.off == r.Off+r.N
			}
		}
		r.need = r.N
	case kind == Write || !p.f.CanDirect(): // (2)
		limit := c.PieceMax
		if kind == Write {
			limit = c.CachedMax
		}
		for n, ok := skip, true; ok; {
			n = min(n, limit-r.N)
			if n == 0 || !r.add(p.at, n, c.PlacesMax) {
				break
			}
			j.advance(&p, n)
			if p, ok = c.following(j, r); !ok {
				break
			}
			end := r.Off + r.N
			if kind == Write && p.off != end {
				c.cutApart(j, r, p)
				break
			}
			// A read also reads a gap between two items if that costs less than another request.
			if p.off < end || p.off-end > gapMax {
				break
			}
			gap := p.off - end
			if r.N+gap >= limit || gap > 0 && len(r.Places) > c.PlacesMax-2 {
				break
			}
			n, blocks = c.directPart(j, &p)
			if ok = (blocks == 0 || n > 0) && r.enter(p.local); ok && gap > 0 {
				ok = r.add(addressOf(r.buffer), gap, c.PlacesMax)
			}
		}
		r.need = r.N
	default: // (3): items at most GapMax apart, up to the first whole block
		mask := p.f.Block - 1
		r.Direct, r.Bounce = true, true
		r.Off = p.off &^ mask
		limit, end := r.Off+BounceBytes, p.off
		for n := skip; ; {
			n = min(n, limit-p.off)
			j.advance(&p, n)
			end = max(end, p.off+n)
			after, ok := c.following(j, r)
			if !ok || n == 0 || after.off < r.Off || after.off >= limit ||
				c.GapMax < 0 || after.off > end+uint64(c.GapMax) {
				break
			}
			p = after
			if n, blocks = c.directPart(j, &p); blocks > 0 && n == 0 || !r.enter(p.local) {
				break
			}
		}
		r.need = end - r.Off
		r.add(addressOf(r.buffer), (r.need+mask)&^mask, c.PlacesMax)
	}
	r.last = j.at
	j.flying++
	c.launch(r)
	return true
}

// gapMax is the largest gap between two items that a read includes: it takes less time to copy so
// many bytes than to make another call.
const gapMax = 4 << 10

// advance moves the cursor past n bytes of a place.
func (j *job) advance(p *place, n uint64) {
	if j.at.off += n; n == p.n {
		j.at = cursor{item: j.at.item + 1}
	}
}

// following returns the place of the job's next item, and whether request r may include it. It may
// if r covers the item before up to its end, and both are in the same file. If a request may have
// only one place in memory (PlacesMax), the items must also be in the same registration.
func (c *Core) following(j *job, r *Request) (_ place, may bool) {
	if j.at.off > 0 || j.at.item == len(j.items) {
		return place{}, false
	}
	p := j.place(j.at)
	return p, p.f == r.File && (c.PlacesMax > 1 || p.local == r.Memory)
}

// mayWrite reports whether a job may begin a write to an inode. It may not while a write of the
// other kind, cached or direct, is in progress, or waits for another attempt (inode.waiting). The
// first job that must wait becomes inode.blocked: from then on no other job begins a write of the
// other kind, so that the wait ends.
func (j *job) mayWrite(p *place, isDirect bool) bool {
	n, mine := p.f.inode, cached
	if isDirect {
		mine = direct
	}
	if n.waiting[1-mine] > 0 || n.blocked != nil && n.blocked != j && n.blockedKind != mine {
		return false
	}
	if n.writing[1-mine] > 0 {
		if n.blocked == nil {
			n.blocked, n.blockedKind = j, mine
		}
		return false
	}
	if n.blocked == j {
		n.blocked = nil
	}
	return true
}

// mayEnter enters memory that a read will write to. The caller holds Mu, and a Renew may wait for
// requests that end only under Mu, so mayEnter does not wait. If a Renew waits or runs, it returns
// false, and starts a goroutine that calls pump once the Renew is over.
func (c *Core) mayEnter(s driver.Shared) bool {
	if s.TryEnter() {
		return true
	}
	if _, waiting := c.renewWaiters[s]; !waiting && c.gate.Enter() {
		c.renewWaiters[s] = struct{}{}
		go func() {
			defer c.gate.Exit()
			s.Enter() // returns once the Renew is over, or has given up
			s.Leave()
			c.Mu.Lock()
			delete(c.renewWaiters, s)
			c.pump()
			c.Leave()
		}()
	}
	return false
}

// cutApart adds items that are apart from those before to a write through the page cache, from the
// one at p on, while all of it remains short.
func (c *Core) cutApart(j *job, r *Request, p place) {
	for ok := !p.f.IsDevice(); ok && r.N+p.n <= c.ScatterMax; p, ok = c.following(j, r) {
		if _, blocks := c.directPart(j, &p); blocks > 0 || !r.addApart(p.at, p.n, p.off,
			c.PlacesMax) {
			return
		}
		j.advance(&p, p.n)
	}
}

// scatter copies the bytes of a bounced read from the buffer to the job's memory.
func (r *Request) scatter() (err error) {
	defer hostmem.CatchFault(&err, hostmem.PanicOnFault())
	j := r.job
	for c := r.first; c != r.last; c = (cursor{item: c.item + 1}) {
		p := j.place(c)
		n := p.n
		if c.item == r.last.item {
			n = r.last.off - c.off
		}
		copy(p.local.mem[p.at-p.local.At:][:n], r.buffer[p.off-r.Off:])
		if c.item == r.last.item {
			return nil
		}
	}
	return nil
}

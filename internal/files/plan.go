// SPDX-License-Identifier: Apache-2.0

package files

import (
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// place is where a job stands: the rest of a piece, in memory and in its file.
type place struct {
	local *Memory
	f     *File
	at    uint64 // address
	off   uint64 // in the file
	n     uint64 // bytes
}

func (j *job) place(c cursor) place {
	i := &j.items[c.item]
	v := &j.views[i.view]
	return place{v.local, v.remote.File, v.local.At + i.local + c.off,
		v.remote.off + i.remote + c.off, i.n - c.off}
}

// whole says which part of a place goes straight between the disk and memory: n bytes after the
// first skip, of whole blocks. A part of a piece must be worth it.
func (c *Core) whole(j *job, p *place) (skip, n uint64) {
	if !p.f.MayPast() {
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

// cut makes the next request of a job, from its cursor, which it moves on, and hands it to the
// Mover. A request is for whole blocks of a file that follow each other, which go straight from or
// to memory (1), for bytes through the page cache (2), or for a read of the blocks that pieces lie
// in into its buffer (3). False: it has to wait until others have ended.
func (c *Core) cut(j *job) bool {
	p := j.place(j.at)
	skip, whole := c.whole(j, &p)
	straight := skip == 0 && whole > 0
	kind := Read
	if j.op == driver.Write {
		kind = Write
		if !j.mayWrite(&p, straight) {
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
	case straight: // (1)
		r.Past = true
		// what follows begins with a whole block
		limit := c.PieceMax - p.off&(p.f.Block-1)
		for n, ok := whole, true; ok; {
			n = min(n, limit-r.N)
			if n == 0 || !r.enter(p.local) || !r.add(p.at, n, c.PlacesMax) {
				break
			}
			j.advance(&p, n)
			if p, ok = c.following(j, r); ok {
				skip, n = c.whole(j, &p)
				ok = skip == 0 && n > 0 && p.off == r.Off+r.N
			}
		}
		r.need = r.N
	case kind == Write || !p.f.MayPast(): // (2)
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
			// A read takes along what lies between two pieces, if that is less than a call costs.
			end := r.Off + r.N
			if p.off < end || p.off-end > gapMax {
				break
			}
			gap := p.off - end
			if r.N+gap >= limit || gap > 0 && (kind == Write || len(r.Places) > c.PlacesMax-2) {
				break
			}
			n, whole = c.whole(j, &p)
			if ok = (whole == 0 || n > 0) && r.enter(p.local); ok && gap > 0 {
				ok = r.add(addressOf(r.buffer), gap, c.PlacesMax)
			}
		}
		r.need = r.N
	default: // (3): blocks no further apart than GapMax, up to where whole ones begin
		mask := p.f.Block - 1
		r.Past, r.Bounce = true, true
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
			if n, whole = c.whole(j, &p); whole > 0 && n == 0 || !r.enter(p.local) {
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

// gapMax is copied in less time than a call takes.
const gapMax = 4 << 10

// advance moves the cursor behind n bytes of a place that a request has taken.
func (j *job) advance(p *place, n uint64) {
	if j.at.off += n; n == p.n {
		j.at = cursor{item: j.at.item + 1}
	}
}

// following returns the next piece, if the last one was taken whole and it lies in the same file.
// Memory of one place is of one registration.
func (c *Core) following(j *job, r *Request) (place, bool) {
	if j.at.off > 0 || j.at.item == len(j.items) {
		return place{}, false
	}
	p := j.place(j.at)
	return p, p.f == r.File && (c.PlacesMax > 1 || p.local == r.Memory)
}

// mayWrite keeps the kinds of write to an inode apart in time. A job that has to wait for the end
// of the other kind takes the turn: no more of that kind begins, so the wait has an end. The same
// holds for a request that waits to be tried again.
func (j *job) mayWrite(p *place, straight bool) bool {
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

// mayEnter enters memory that a request is to land in. False: a Renew waits or runs, and what is to
// be begun begins when that is over. It waits for nothing: what the Renew waits for ends under Mu.
func (c *Core) mayEnter(s driver.Shared) bool {
	if s.TryEnter() {
		return true
	}
	if _, waits := c.returning[s]; !waits && c.gate.Enter() {
		c.returning[s] = struct{}{}
		go func() {
			defer c.gate.Exit()
			s.Enter() // when the Renew is over, or has waited for long itself
			s.Leave()
			c.Mu.Lock()
			delete(c.returning, s)
			c.pump()
			c.Leave()
		}()
	}
	return false
}

// scatter copies what came into the buffer to where it belongs.
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

// SPDX-License-Identifier: Apache-2.0

package tcp

import "github.com/sluicehq/sluice/driver"

// ranges is a cursor over the runs of memory that one part names, on one side: at the owner as its
// frame names them, at the initiator as the local side of the batch does. All are checked to lie
// within the memory before. A copy of the cursor looks ahead.
type ranges struct {
	left uint64 // bytes of the part behind the cursor
	off  uint64 // where in the memory the cursor is
	n    uint64 // bytes of this run behind the cursor; 0: findPiece finds the next run

	// where the runs come from, one of these
	table   []byte          // the entries of a frame
	descs   []driver.Desc   // the local side of descriptors
	pattern *driver.Pattern // its side
	side    *driver.Side

	i       int                     // the next entry of table, desc, or entry of pattern
	skip    uint64                  // bytes of it that an earlier part has
	run     uint64                  // of a pattern: where its next run begins
	loopPos [driver.LoopsMax]uint32 // of a pattern: the round of each loop
}

// walkPattern puts the cursor on a pattern, skip bytes behind the beginning of an entry.
func (r *ranges) walkPattern(p *driver.Pattern, side *driver.Side, entry int, skip uint64) {
	r.pattern, r.side, r.i = p, side, entry
	r.run = side.At(entry)
	at := skip / p.Run
	r.skip = skip % p.Run
	for l := len(p.Loops) - 1; l >= 0; l-- {
		n := uint64(p.Loops[l].N)
		r.loopPos[l] = uint32(at % n)
		r.run += at % n * r.stride(l)
		at /= n
	}
}

// stride returns how far apart the rounds of a loop are, on this side.
func (r *ranges) stride(loop int) uint64 {
	if r.side == &r.pattern.Remote {
		return r.pattern.Loops[loop].Remote
	}
	return r.pattern.Loops[loop].Local
}

// next returns the run at the cursor. Preconditions: left is over 0.
func (r *ranges) next() (off, n uint64) {
	if r.n == 0 {
		r.findPiece()
	}
	return r.off, min(r.n, r.left)
}

// findPiece finds the next run.
func (r *ranges) findPiece() {
	switch {
	case r.pattern != nil:
		r.findRun()
	case r.descs != nil:
		d := &r.descs[r.i]
		r.off, r.n = d.Local+r.skip, d.Len-r.skip
		r.i, r.skip = r.i+1, 0
	default:
		r.off, r.n = entryAt(r.table, r.i)
		r.i++
	}
}

// findRun is findPiece for a pattern. Adjacent runs become one.
func (r *ranges) findRun() {
	p, left := r.pattern, r.left
	length := p.Run
	off, n := r.run+r.skip, length-r.skip
	r.skip = 0
	if len(p.Loops) == 0 && r.side.Per <= 1 {
		s, i, run := r.side, r.i, uint64(0)
		for i++; i < p.Count; i++ { // computes what Side.At returns, without the call
			slot := uint64(i)
			if s.List != nil {
				slot = uint64(s.List[i])
			}
			if run = s.Base + slot*s.Stride; n >= left || run != off+n {
				break
			}
			n += length
		}
		r.i, r.run = i, run
	} else {
		for r.nextRun(); n < left && r.run == off+n; r.nextRun() {
			n += length
		}
	}
	r.off, r.n = off, n
}

// nextRun finds where the next run of a pattern begins.
func (r *ranges) nextRun() {
	loops := r.pattern.Loops
	for l := len(loops) - 1; l >= 0; l-- {
		stride := r.stride(l)
		if r.loopPos[l]++; r.loopPos[l] < loops[l].N {
			r.run += stride
			return
		}
		r.loopPos[l] = 0
		r.run -= stride * uint64(loops[l].N-1)
	}
	if r.i++; r.i < r.pattern.Count {
		r.run = r.side.At(r.i)
	}
}

// advance moves the cursor by n bytes, at most as many as next has returned.
func (r *ranges) advance(n uint64) {
	r.left -= n
	r.off += n
	r.n -= n
}

// skipOver moves the cursor by n bytes, over any number of runs.
func (r *ranges) skipOver(n uint64) {
	for n > 0 {
		_, k := r.next()
		k = min(k, n)
		r.advance(k)
		n -= k
	}
}

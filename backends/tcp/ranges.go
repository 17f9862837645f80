// SPDX-License-Identifier: Apache-2.0

package tcp

import "github.com/sluicehq/sluice/driver"

// ranges walks the pieces of one part in one memory: as a frame names them, or as the local
// side of a batch does. All of them were checked to lie within the memory. It is copied to look
// ahead.
type ranges struct {
	left uint64 // bytes of the part that are not passed
	off  uint64 // where the piece at the cursor goes on, for
	n    uint64 // bytes; 0: the next piece is to be looked up

	table   []byte          // the pieces are entries of a frame, or
	descs   []driver.Desc   // the local side of descriptors, or
	pattern *driver.Pattern // runs of a pattern,
	side    *driver.Side    // of this side of it

	i    int                     // piece that is looked up next; of a pattern: the entry of run
	skip uint64                  // bytes of it that are left out
	run  uint64                  // where the next run of the pattern begins
	pos  [driver.LoopsMax]uint32 // which it is of each loop
}

// walkPattern begins skip bytes behind the start of an entry.
func (r *ranges) walkPattern(p *driver.Pattern, side *driver.Side, entry int, skip uint64) {
	r.pattern, r.side, r.i = p, side, entry
	r.run = side.At(entry)
	at := skip / p.Run
	r.skip = skip % p.Run
	for l := len(p.Loops) - 1; l >= 0; l-- {
		n := uint64(p.Loops[l].N)
		r.pos[l] = uint32(at % n)
		r.run += at % n * r.stride(l)
		at /= n
	}
}

func (r *ranges) stride(loop int) uint64 {
	if r.side == &r.pattern.Remote {
		return r.pattern.Loops[loop].Remote
	}
	return r.pattern.Loops[loop].Local
}

// next returns the contiguous range at the cursor; left is over 0.
func (r *ranges) next() (off, n uint64) {
	if r.n == 0 {
		r.look()
	}
	return r.off, min(r.n, r.left)
}

// look finds the next piece.
func (r *ranges) look() {
	switch {
	case r.pattern != nil:
		r.lookRun()
	case r.descs != nil:
		d := &r.descs[r.i]
		r.off, r.n = d.Local+r.skip, d.Len-r.skip
		r.i, r.skip = r.i+1, 0
	default:
		r.off, r.n = entryAt(r.table, r.i)
		r.i++
	}
}

// lookRun takes runs of a pattern that adjoin as one piece.
func (r *ranges) lookRun() {
	p, left := r.pattern, r.left
	length := p.Run
	off, n := r.run+r.skip, length-r.skip
	r.skip = 0
	if len(p.Loops) == 0 && r.side.Per <= 1 {
		s, i, run := r.side, r.i, uint64(0)
		for i++; i < p.Count; i++ { // as Side.At has it, without a call
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
		for r.step(); n < left && r.run == off+n; r.step() {
			n += length
		}
	}
	r.off, r.n = off, n
}

// step moves on by one run.
func (r *ranges) step() {
	loops := r.pattern.Loops
	for l := len(loops) - 1; l >= 0; l-- {
		stride := r.stride(l)
		if r.pos[l]++; r.pos[l] < loops[l].N {
			r.run += stride
			return
		}
		r.pos[l] = 0
		r.run -= stride * uint64(loops[l].N-1)
	}
	if r.i++; r.i < r.pattern.Count {
		r.run = r.side.At(r.i)
	}
}

// advance moves on by n bytes, at most what next returned.
func (r *ranges) advance(n uint64) {
	r.left -= n
	r.off += n
	r.n -= n
}

// skipOver moves on by n bytes of any number of pieces.
func (r *ranges) skipOver(n uint64) {
	for n > 0 {
		_, k := r.next()
		k = min(k, n)
		r.advance(k)
		n -= k
	}
}

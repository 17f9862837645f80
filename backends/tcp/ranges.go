// SPDX-License-Identifier: Apache-2.0

package tcp

import "github.com/sluicehq/sluice/driver"

// ranges walks the pieces of one part in one memory: as a frame names them, or as the local
// side of a batch does. It is copied to look ahead.
type ranges struct {
	left uint64 // bytes of the part that are not passed
	size uint64 // of the memory
	off  uint64 // where the piece at the cursor goes on, for
	n    uint64 // bytes; 0: the next piece is to be looked up
	bad  bool   // that piece is not within the memory

	table   []byte          // the pieces are entries of a frame, or
	descs   []driver.Desc   // the local side of descriptors, or
	pattern *driver.Pattern // runs of one side of a pattern
	remote  bool            // which side

	i    int                     // piece that is looked up next; of a pattern: the entry of run
	skip uint64                  // bytes of it that are left out
	run  uint64                  // where the next run of the pattern begins
	pos  [driver.LoopsMax]uint32 // which it is of each loop
}

// walkPattern begins skip bytes behind the start of an entry.
func (r *ranges) walkPattern(p *driver.Pattern, remote bool, entry int, skip uint64) {
	r.pattern, r.remote, r.i = p, remote, entry
	r.run = r.side().At(entry)
	at := skip / p.Run
	r.skip = skip % p.Run
	for l := len(p.Loops) - 1; l >= 0; l-- {
		n := uint64(p.Loops[l].N)
		r.pos[l] = uint32(at % n)
		r.run += at % n * r.stride(l)
		at /= n
	}
}

func (r *ranges) side() *driver.Side {
	if r.remote {
		return &r.pattern.Remote
	}
	return &r.pattern.Local
}

func (r *ranges) stride(loop int) uint64 {
	if r.remote {
		return r.pattern.Loops[loop].Remote
	}
	return r.pattern.Loops[loop].Local
}

// next returns the contiguous range at the cursor; left is over 0. It reports false if that is
// not within the memory, as in an index list that has changed.
func (r *ranges) next() (off, n uint64, ok bool) {
	if r.n == 0 {
		r.look()
	}
	return r.off, min(r.n, r.left), !r.bad
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
	r.bad = r.off > r.size || min(r.n, r.left) > r.size-r.off
}

// lookRun takes runs of a pattern that adjoin as one piece.
func (r *ranges) lookRun() {
	r.off, r.n, r.skip = r.run+r.skip, r.pattern.Run-r.skip, 0
	for r.step(); r.n < r.left && r.run == r.off+r.n; r.step() {
		r.n += r.pattern.Run
	}
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
		r.run = r.side().At(r.i)
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
		_, k, _ := r.next()
		k = min(k, n)
		r.advance(k)
		n -= k
	}
}

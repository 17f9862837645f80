// SPDX-License-Identifier: Apache-2.0

package tcp

// ranges walks the pieces of one part in one memory: as a table on the wire names them, or
// as the local side of a batch does.
type ranges struct {
	table []byte // nil: batch
	batch *batch
	i     int
	off   uint64 // done of piece i
	rest  uint64 // of piece i, after next
	left  uint64 // bytes of the part
}

// next returns the contiguous range at the cursor; left is over 0.
func (r *ranges) next() (off, n uint64) {
	if r.batch != nil {
		off, n = r.batch.local(r.i)
	} else {
		off, n = entryAt(r.table, r.i)
	}
	r.rest = n - r.off
	return off + r.off, min(r.rest, r.left)
}

// advance moves on by n bytes, at most what next returned.
func (r *ranges) advance(n uint64) {
	r.left -= n
	if n == r.rest {
		r.i, r.off = r.i+1, 0
	} else {
		r.off += n
	}
}

// skip moves on by n bytes of any number of pieces.
func (r *ranges) skip(n uint64) {
	for n > 0 {
		_, k := r.next()
		k = min(k, n)
		r.advance(k)
		n -= k
	}
}

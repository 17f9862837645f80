// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package cuda

// Native says whether the twin runs in C.
const Native = false

// move moves entries [first, first+n) and adds to the tally.
func move(m *Move, a *args, first, n uint64, t *tally) {
	for i := first; i < first+n; i++ {
		d, skipDst := m.Dst.at(i)
		s, skipSrc := m.Src.at(i)
		switch {
		case skipDst || skipSrc:
			t.skipped++
		case d >= a.dstPlaces || s >= a.srcPlaces:
			t.bad++
			t.firstBad = min(t.firstBad, i)
		default:
			for k := range m.Parts {
				p, q := &m.Parts[k], &a.part[k]
				copy(p.Dst[d*q.dstStride:][:p.Entry], p.Src[s*q.srcStride:][:p.Entry])
			}
		}
	}
}

// at returns an index, and whether it says to skip.
func (x *Index) at(i uint64) (place uint64, skip bool) {
	switch {
	case x.U64 != nil:
		return x.U64[i], x.U64[i] == Skip64
	case x.U32 != nil:
		return uint64(x.U32[i]), x.U32[i] == Skip32
	}
	return i, false
}

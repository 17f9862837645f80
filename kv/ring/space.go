// SPDX-License-Identifier: Apache-2.0

package ring

import "slices"

// space is the room that no object has. Objects begin at lines of the processor's cache.
type space struct {
	free []span // by address; no two touch
}

type span struct{ at, length uint64 }

const line = 64

// room returns what an object of n bytes takes.
func room(n uint64) uint64 { return max((n+line-1)&^(line-1), line) }

// take takes the first n bytes that are free in one piece.
func (s *space) take(n uint64) (at uint64, ok bool) {
	for i := range s.free {
		f := &s.free[i]
		if f.length < n {
			continue
		}
		at = f.at
		if f.at, f.length = f.at+n, f.length-n; f.length == 0 {
			s.free = slices.Delete(s.free, i, i+1)
		}
		return at, true
	}
	return 0, false
}

// giveBack makes a span free, in one with its neighbours.
func (s *space) giveBack(at, n uint64) {
	i, _ := slices.BinarySearchFunc(s.free, at, func(f span, at uint64) int {
		if f.at < at {
			return -1
		}
		return 1
	})
	before := i > 0 && s.free[i-1].at+s.free[i-1].length == at
	behind := i < len(s.free) && at+n == s.free[i].at
	switch {
	case before && behind:
		s.free[i-1].length += n + s.free[i].length
		s.free = slices.Delete(s.free, i, i+1)
	case before:
		s.free[i-1].length += n
	case behind:
		s.free[i].at, s.free[i].length = at, s.free[i].length+n
	default:
		s.free = slices.Insert(s.free, i, span{at, n})
	}
}

// pieceWith returns the objects that must go for n free bytes in one piece, if the first ones of
// may, up to last, may; nil: there is no such piece. byPlace has the indices of may by address.
func (s *space) pieceWith(n uint64, may []*object, byPlace []int, last int) (piece []*object) {
	var from, end uint64 // of the piece so far
	f := s.free
	for _, i := range byPlace {
		o := may[i]
		if i > last {
			continue
		}
		for ; len(f) > 0 && f[0].at < o.at; f = f[1:] {
			if f[0].at != end {
				from, piece = f[0].at, piece[:0]
			}
			end = f[0].at + f[0].length
		}
		if o.at != end {
			from, piece = o.at, piece[:0]
		}
		piece, end = append(piece, o), o.at+room(o.length)
		if len(f) > 0 && f[0].at == end {
			end, f = end+f[0].length, f[1:]
		}
		if end-from >= n {
			for len(piece) > 1 && end-piece[1].at >= n {
				piece = piece[1:]
			}
			return piece
		}
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"slices"
	"sort"

	"github.com/sluicehq/sluice/driver"
)

// piece is a run of a Buffer that lies in one layer, at the same offset there.
type piece struct {
	off, len uint64
	layer    *layer
}

func (p piece) end() uint64 { return p.off + p.len }

// Lend implements driver.Shared. It keeps Close out, too, while f runs.
func (b *Buffer) Lend(f func(extents []driver.Extent) error) error {
	b.mu.RLock()
	defer b.mu.RUnlock()
	if b.mem == nil {
		return driver.ErrClosed
	}
	extents := make([]driver.Extent, len(b.pieces))
	for i, p := range b.pieces {
		extents[i] = driver.Extent{Off: p.off, Len: p.len, FD: p.layer.fd, FDOff: p.off}
	}
	return f(extents)
}

// splice puts a piece over others and joins it with neighbours in its layer.
func splice(pieces []piece, p piece) []piece {
	first, last, p := around(pieces, p)
	var put []piece
	if q := pieces[first]; q.off < p.off {
		put = append(put, piece{q.off, p.off - q.off, q.layer})
	}
	put = append(put, p)
	if q := pieces[last]; p.end() < q.end() {
		put = append(put, piece{p.end(), q.end() - p.end(), q.layer})
	}
	return slices.Replace(pieces, first, last+1, put...)
}

// spliced is how many pieces there would be.
func spliced(pieces []piece, p piece) int {
	first, last, p := around(pieces, p)
	n := len(pieces) - (last - first)
	if pieces[first].off < p.off {
		n++
	}
	if p.end() < pieces[last].end() {
		n++
	}
	return n
}

// around widens a piece by its neighbours in the same layer, and returns the first and last that
// it then lies over.
func around(pieces []piece, p piece) (first, last int, wide piece) {
	first = sort.Search(len(pieces), func(i int) bool { return pieces[i].end() > p.off })
	last = first + sort.Search(len(pieces)-first, func(i int) bool {
		return pieces[first+i].end() >= p.end()
	})
	from, to := p.off, p.end()
	if first > 0 && pieces[first].off == from && pieces[first-1].layer == p.layer {
		first--
	}
	if last+1 < len(pieces) && pieces[last].end() == to && pieces[last+1].layer == p.layer {
		last++
	}
	if q := pieces[first]; q.layer == p.layer {
		from = min(from, q.off)
	}
	if q := pieces[last]; q.layer == p.layer {
		to = max(to, q.end())
	}
	return first, last, piece{from, to - from, p.layer}
}

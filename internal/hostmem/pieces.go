// SPDX-License-Identifier: Apache-2.0

package hostmem

import "github.com/sluicehq/sluice/driver"

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
	out := make([]piece, 0, len(pieces)+2)
	put := func(q piece) {
		if q.len == 0 {
			return
		}
		if i := len(out) - 1; i >= 0 && out[i].layer == q.layer {
			out[i].len += q.len
			return
		}
		out = append(out, q)
	}
	placed := false
	for _, q := range pieces {
		if q.off < p.off {
			put(piece{q.off, min(q.end(), p.off) - q.off, q.layer})
		}
		if !placed && q.end() > p.off {
			put(p)
			placed = true
		}
		if from := max(q.off, p.end()); from < q.end() {
			put(piece{from, q.end() - from, q.layer})
		}
	}
	return out
}

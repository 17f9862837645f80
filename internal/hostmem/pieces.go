// SPDX-License-Identifier: Apache-2.0

package hostmem

import "github.com/sluicehq/sluice/driver"

// piece is a run of a Buffer that lies in one layer, at the same offset there.
type piece struct {
	off, len uint64
	layer    *layer
}

func (p piece) end() uint64 { return p.off + p.len }

// Extents implements driver.Shared. The descriptors stay open until a Renew
// replaces the last of their pages or until Close; to hand them on while another
// goroutine may do that, use Lend.
func (b *Buffer) Extents(dst []driver.Extent) []driver.Extent {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return b.extents(dst)
}

func (b *Buffer) extents(dst []driver.Extent) []driver.Extent {
	for _, p := range b.pieces {
		dst = append(dst, driver.Extent{Off: p.off, Len: p.len, FD: p.layer.fd, FDOff: p.off})
	}
	return dst
}

// Lend calls f with the extents and their generation, and keeps the descriptors
// open until f returns. f must not call Renew or Close, nor keep the slice.
func (b *Buffer) Lend(f func(extents []driver.Extent, generation uint64) error) error {
	b.mu.RLock()
	defer b.mu.RUnlock()
	if b.mem == nil {
		return driver.ErrClosed
	}
	return f(b.extents(nil), b.generation.Load())
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

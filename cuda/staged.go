// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"math"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/driver"
)

// stages says which way a Move would be staged, or why it cannot be.
func (m *DeviceMove) stages(a *args) (scatter bool, why string) {
	if a.entries() > slotBytes {
		return false, fmt.Sprintf("entries of %d bytes do not fit in a slot of %d", a.entries(),
			slotBytes)
	}
	toCard, toHost, dstRuns, srcRuns := 0, 0, m.Dst.List.Memory == nil, m.Src.List.Memory == nil
	for k := range m.Parts {
		p, q := &m.Parts[k], &a.part[k]
		switch {
		case p.Src.Memory.host != nil && p.Dst.Memory.host == nil:
			toCard++
		case p.Src.Memory.host == nil && p.Dst.Memory.host != nil:
			toHost++
		}
		dstRuns = dstRuns && q.dstStride == uint64(q.entry)
		srcRuns = srcRuns && q.srcStride == uint64(q.entry)
	}
	switch len(m.Parts) {
	case toCard:
		if !dstRuns {
			why = "the CPU gathers for a run in the card's memory alone, without a list or gaps"
		}
	case toHost:
		if !srcRuns {
			why = "the CPU scatters from a run in the card's memory alone, without a list or gaps"
		}
	default:
		why = "the CPU gathers between the host's memory and the card's alone"
	}
	return toHost > 0, why
}

// slot is where part k of a piece lies in the ring: the CPU's view and the card's.
func (v *mover) slot(a *args, piece uint64, k int, each uint64) (mem []byte, at uint64) {
	off := piece % gpu.Marks * slotBytes
	if k > 0 {
		off += each * uint64(a.part[0].entry)
	}
	return v.pinned.Bytes()[off:][:each*uint64(a.part[k].entry)], v.at + off
}

// gather has the CPU gather n entries of the chunk by pieces, which the copy engine fetches while
// the next are gathered.
func (v *mover) gather(m *DeviceMove, a *args, n uint64, t *tally) error {
	each := slotBytes / a.entries()
	for i, piece := uint64(0), uint64(0); i < n; i, piece = i+each, piece+1 {
		if err := v.copier.Await(int(piece % gpu.Marks)); err != nil {
			return err
		}
		if err := v.gatherPiece(m, a, piece, i, min(each, n-i), t); err != nil {
			return err
		}
		if err := v.copier.Mark(int(piece % gpu.Marks)); err != nil {
			return err
		}
	}
	return nil
}

func (v *mover) gatherPiece(m *DeviceMove, a *args, piece, i, n uint64, t *tally) error {
	v.begins(a, i, n)
	for k := range m.Parts {
		mem, _ := v.slot(a, piece, k, n)
		v.parts[k].Dst = mem
		v.parts[k].Src = v.far(&m.Parts[k].Src, a.part[k].srcStride, v.lists[1], i)
		v.parts[k].SrcStride = a.part[k].srcStride
	}
	v.piece.Src = v.lists[1].slice(i, n)
	moved, err := v.twin.Run(&v.piece)
	if err != nil && err != driver.ErrBounds {
		return err
	}
	// The twin knows nothing of the end of the card's memory, and skips must leave gaps there.
	whole := moved.Moved == n && v.first+i+n <= a.dstPlaces
	for k := range m.Parts {
		p := &a.part[k]
		_, at := v.slot(a, piece, k, n)
		if whole {
			if err := v.add(k, p.dst+(v.first+i)*p.dstStride, at, n*uint64(p.entry)); err != nil {
				return err
			}
			continue
		}
		for j := range n {
			dst, _, moves := v.judge(a, i+j, counts(t, k))
			if !moves {
				continue
			}
			if err := v.add(k, p.dst+dst*p.dstStride, at+j*uint64(p.entry),
				uint64(p.entry)); err != nil {
				return err
			}
		}
	}
	return v.flush()
}

// counts is the tally for the first part alone: all parts go by the same indices.
func counts(t *tally, part int) *tally {
	if part == 0 {
		return t
	}
	return nil
}

// scatter has the copy engine bring n entries of the chunk by pieces, which the CPU scatters while
// the next are on their way.
func (v *mover) scatter(m *DeviceMove, a *args, n uint64, t *tally) error {
	const ahead = gpu.Marks - 1
	each := slotBytes / a.entries()
	pieces := (n + each - 1) / each
	for p := range pieces + ahead {
		if p < pieces {
			if err := v.fetchPiece(a, p, each, min(each, n-p*each)); err != nil {
				return err
			}
		}
		if p < ahead {
			continue
		}
		if err := v.scatterPiece(m, a, p-ahead, (p-ahead)*each, min(each, n-(p-ahead)*each),
			t); err != nil {
			return err
		}
	}
	return nil
}

func (v *mover) fetchPiece(a *args, piece, each, n uint64) error {
	first := v.first + piece*each
	there := min(n, a.srcPlaces-min(a.srcPlaces, first))
	for k := range a.part[:a.parts] {
		p := &a.part[k]
		_, at := v.slot(a, piece, k, n)
		if there == 0 {
			continue
		}
		if err := v.add(k, at, p.src+first*p.srcStride, there*uint64(p.entry)); err != nil {
			return err
		}
	}
	if err := v.flush(); err != nil {
		return err
	}
	return v.copier.Mark(int(piece % gpu.Marks))
}

func (v *mover) scatterPiece(m *DeviceMove, a *args, piece, i, n uint64, t *tally) error {
	if err := v.copier.Await(int(piece % gpu.Marks)); err != nil {
		return err
	}
	v.begins(a, i, n)
	there := min(n, a.srcPlaces-min(a.srcPlaces, v.first+i))
	for k := range m.Parts {
		mem, _ := v.slot(a, piece, k, n)
		v.parts[k].Src = mem[:there*uint64(a.part[k].entry)]
		v.parts[k].Dst = v.far(&m.Parts[k].Dst, a.part[k].dstStride, v.lists[0], i)
		v.parts[k].DstStride = a.part[k].dstStride
	}
	v.piece.Dst = v.lists[0].slice(i, n)
	moved, err := v.twin.Run(&v.piece)
	if err != nil && err != driver.ErrBounds {
		return err
	}
	t.skipped += moved.Skipped
	t.bad += moved.Bad
	if moved.Bad > 0 {
		t.firstBad = min(t.firstBad, v.first+i+moved.FirstBad)
	}
	return nil
}

// begins makes the twin's Move one of n entries from i of the chunk on, without its memories.
func (v *mover) begins(a *args, i, n uint64) {
	v.piece = Move{Parts: v.parts[:a.parts], Count: int(n)}
	for k := range v.piece.Parts {
		v.parts[k] = Part{Entry: uint64(a.part[k].entry)}
	}
}

// far is the host's memory of a part, as a list counts in it, or from entry i of the chunk on.
func (v *mover) far(s *Span, stride uint64, list Index, i uint64) []byte {
	mem := s.Memory.host[s.Off:][:s.N]
	if list.U32 != nil || list.U64 != nil {
		return mem
	}
	if v.first+i > math.MaxInt64/stride {
		return nil
	}
	return mem[min((v.first+i)*stride, s.N):]
}

// slice is n indices from i on; none of none.
func (x Index) slice(i, n uint64) Index {
	switch {
	case x.U64 != nil:
		return Index{U64: x.U64[i:][:n]}
	case x.U32 != nil:
		return Index{U32: x.U32[i:][:n]}
	}
	return Index{}
}

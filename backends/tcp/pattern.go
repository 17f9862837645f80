// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"encoding/binary"
	"math"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// A frame with flagPattern has a fragment in place of a table: a part of the owner's side of a
// pattern, which the owner expands. It is patternBytes long, and the slots of an index list follow.
const (
	patternBytes = 92
	slotBytes    = 4
	// so that a fragment is no longer than the longest table
	slotsMax = (entriesMax*entryBytes - patternBytes) / slotBytes
)

// fragment is the part of a pattern that one frame carries.
type fragment struct {
	pattern driver.Pattern // Remote and what both sides share; Local is not set
	loops   [driver.LoopsMax]driver.Loop
	skip    uint64 // bytes of the first entry that an earlier frame has
	bytes   uint64
}

// append appends the encoding.
func (f *fragment) append(b []byte) []byte {
	p, s := &f.pattern, &f.pattern.Remote
	for _, v := range [...]uint64{p.Run, s.Base, s.Stride, s.Step, f.skip} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	for _, v := range [...]uint32{uint32(f.bytes), uint32(p.Count), s.First, s.Per} {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	for l := range driver.LoopsMax {
		var loop driver.Loop // N is 0: there is none
		if l < len(p.Loops) {
			loop = p.Loops[l]
		}
		b = binary.LittleEndian.AppendUint32(b, loop.N)
		b = binary.LittleEndian.AppendUint64(b, loop.Remote)
	}
	for _, slot := range s.List {
		b = binary.LittleEndian.AppendUint32(b, slot)
	}
	return b
}

// decode decodes what a peer sent, which may be anything. The list goes into slots. check checks
// the bounds.
func (f *fragment) decode(body []byte, slots []uint32) bool {
	r := session.ReadMessage(body)
	p, s := &f.pattern, &f.pattern.Remote
	*p = driver.Pattern{}
	p.Run, s.Base, s.Stride, s.Step, f.skip = r.Uint64(), r.Uint64(), r.Uint64(), r.Uint64(),
		r.Uint64()
	f.bytes, p.Count = uint64(r.Uint32()), int(r.Uint32())
	s.First, s.Per = r.Uint32(), r.Uint32()
	n := 0
	for l := range driver.LoopsMax {
		f.loops[l] = driver.Loop{N: r.Uint32(), Remote: r.Uint64()}
		if f.loops[l].N > 0 && n == l {
			n++
		} else if f.loops[l] != (driver.Loop{}) {
			r.Fail()
		}
	}
	p.Loops = f.loops[:n]
	if count := r.Rest() / slotBytes; count > 0 {
		if count > len(slots) {
			return false
		}
		s.List = slots[:count]
		for i := range s.List {
			s.List[i] = r.Uint32()
		}
	}
	return r.Done()
}

// check reports whether all of the fragment lies within a memory of that size. Pattern.Check wants
// a local side: the zero value, one run over and over, is within a memory of one run.
func (f *fragment) check(size uint64) bool {
	if f.pattern.Check(f.pattern.Run, size) != nil {
		return false
	}
	all := f.pattern.Bytes()
	if f.bytes == 0 || f.bytes > partBytes || f.bytes > all {
		return false
	}
	return f.skip < f.pattern.EntryLen() && f.skip <= all-f.bytes
}

// cutPattern cuts the next part off a pattern and appends its fragment to the chunk. It returns the
// bytes of the part, and how many slots are listed.
func (x *batch) cutPattern(o *sender) (bytes uint64, slots uint32) {
	p := &x.pattern
	bytes = min(partBytes, uint64(p.Count-x.piece)*x.entryLen-x.pieceOff)
	end := x.piece + int((x.pieceOff+bytes+x.entryLen-1)/x.entryLen)
	end = min(end, lastEntry(&p.Remote, x.piece))
	bytes = min(bytes, uint64(end-x.piece)*x.entryLen-x.pieceOff)
	f := fragment{skip: x.pieceOff, bytes: bytes}
	f.pattern = driver.Pattern{Run: p.Run, Loops: p.Loops, Count: end - x.piece}
	f.pattern.Remote = cutSide(p.Remote, x.piece, end)
	o.chunk.n = len(f.append(o.chunk.mem[:o.chunk.n]))
	x.pieceOff += bytes
	x.piece += int(x.pieceOff / x.entryLen)
	x.pieceOff %= x.entryLen
	return bytes, uint32(len(f.pattern.Remote.List))
}

// lastEntry returns the end of the entries from i on that one frame can name of a side.
func lastEntry(s *driver.Side, i int) int {
	if s.List == nil {
		return math.MaxInt
	}
	per, first := int(max(1, s.Per)), int(s.First)
	return ((first+i)/per+slotsMax)*per - first
}

// cutSide returns the part of a side in which the entries [i, end) lie.
func cutSide(s driver.Side, i, end int) driver.Side {
	per, first := int(max(1, s.Per)), int(s.First)
	from, to := (first+i)/per, (first+end-1)/per+1
	s.First = uint32((first + i) % per)
	if s.List != nil {
		s.List = s.List[from:to]
	} else {
		s.Base += uint64(from) * s.Stride
	}
	return s
}

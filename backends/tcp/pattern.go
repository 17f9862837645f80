// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"encoding/binary"
	"math"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// A frame with flagPattern has in place of a table a part of the owner's side of a pattern: a
// head of one size, and then the numbers of the slots where that side has a list, 4 bytes
// each. The owner expands it.
const (
	patternBytes = 92
	slotBytes    = 4
	// as long as the longest table
	slotsMax = (entriesMax*entryBytes - patternBytes) / slotBytes
)

// fragment is what one frame carries of a pattern.
type fragment struct {
	pattern driver.Pattern // Remote, and what both sides have in common
	loops   [driver.LoopsMax]driver.Loop
	skip    uint64 // bytes of the first entry that are left out
	bytes   uint64
}

// append appends the head and the list.
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

// decode reads what a peer sent, which may be anything; slots takes the list. Bounds are not
// looked at: check does that.
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

// check reports whether all of the fragment lies within a memory. The local side is made to be
// the one run that the check asks for.
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

// cutPattern puts the next part of a pattern into the chunk, of which the head of the frame is
// there already. It returns the bytes of the part, and how many slots are listed.
func (x *batch) cutPattern(o *sender) (bytes uint64, slots uint32) {
	p := &x.pattern
	bytes = min(partBytes, uint64(p.Count-x.i)*x.entry-x.off)
	end := x.i + int((x.off+bytes+x.entry-1)/x.entry)
	end = min(end, lastEntry(&p.Remote, x.i))
	bytes = min(bytes, uint64(end-x.i)*x.entry-x.off)
	f := fragment{skip: x.off, bytes: bytes}
	f.pattern = driver.Pattern{Run: p.Run, Loops: p.Loops, Count: end - x.i}
	f.pattern.Remote = cutSide(p.Remote, x.i, end)
	o.chunk.n = len(f.append(o.chunk.mem[:o.chunk.n]))
	x.off += bytes
	x.i += int(x.off / x.entry)
	x.off %= x.entry
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

// SPDX-License-Identifier: Apache-2.0

package exchange

import (
	"encoding/binary"
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// The shape of staging memory: slots of one piece and its list.
const (
	PieceBytes = 1 << 20 // of data in a slot
	ListBytes  = 64 << 10
	SlotBytes  = PieceBytes + ListBytes
	DescsMax   = ListBytes / descBytes // descriptors in a piece
	IndicesMax = ListBytes / 4         // indices in a piece
	descBytes  = 16
)

// Hop asks the peer for a hop between a slot of its window and memory that it described: of Count
// descriptors in the slot's list, or of Count entries of one length, which lie at Base +
// index*Stride.
type Hop struct {
	Slot   uint16
	Number uint32 // of the piece in the slot
	Token  []byte // HopToken bytes

	Durable bool // of a put: the answer comes once the bytes would survive a loss of power
	Count   int
	Paged   bool // entries
	Listed  bool // whose indices lie in the slot's list; otherwise they count up

	EntryLen, Base, Stride uint64 // bytes
}

// HopToken is the length of what a peer must show for a hop: secret and key.
const HopToken = 16 + 4

// HopName is the length of what names a hop: slot and number.
const HopName = 2 + 4

const (
	hopBytes    = HopName + HopToken + 1 + 4 + 8 + 8 + 8
	flagPaged   = 1
	flagListed  = 2
	flagDurable = 4
)

// AppendName appends what names the hop.
func (h *Hop) AppendName(b []byte) []byte {
	b = binary.LittleEndian.AppendUint16(b, h.Slot)
	return binary.LittleEndian.AppendUint32(b, h.Number)
}

// Append appends the request, behind its kind.
func (h *Hop) Append(b []byte) []byte {
	b = append(h.AppendName(b), h.Token...)
	flags := byte(0)
	if h.Paged {
		flags |= flagPaged
	}
	if h.Listed {
		flags |= flagListed
	}
	if h.Durable {
		flags |= flagDurable
	}
	b = binary.LittleEndian.AppendUint32(append(b, flags), uint32(h.Count))
	b = binary.LittleEndian.AppendUint64(b, h.EntryLen)
	b = binary.LittleEndian.AppendUint64(b, h.Base)
	return binary.LittleEndian.AppendUint64(b, h.Stride)
}

// ParseName reads what names a hop.
func (h *Hop) ParseName(b []byte) (rest []byte, ok bool) {
	if len(b) < HopName {
		return nil, false
	}
	h.Slot = binary.LittleEndian.Uint16(b)
	h.Number = binary.LittleEndian.Uint32(b[2:])
	return b[HopName:], true
}

// Parse reads a hop and bounds it by what a slot holds. The memory's bounds are for later.
func (h *Hop) Parse(b []byte) error {
	rest, ok := h.ParseName(b)
	if !ok || len(b) != hopBytes {
		return fmt.Errorf("a request of %d bytes, not %d: %w", len(b), hopBytes, driver.ErrCorrupt)
	}
	h.Token, rest = rest[:HopToken], rest[HopToken:]
	flags, count := rest[0], binary.LittleEndian.Uint32(rest[1:])
	h.Paged, h.Listed, h.Durable = flags&flagPaged != 0, flags&flagListed != 0,
		flags&flagDurable != 0
	h.EntryLen, h.Base, h.Stride = binary.LittleEndian.Uint64(rest[5:]),
		binary.LittleEndian.Uint64(rest[13:]), binary.LittleEndian.Uint64(rest[21:])
	switch {
	case flags > flagPaged|flagListed|flagDurable, h.Listed && !h.Paged, count == 0:
		return fmt.Errorf("a request with flags %#x for %d pieces: %w", flags, count,
			driver.ErrCorrupt)
	case !h.Paged && count > DescsMax, h.Listed && count > IndicesMax:
		return fmt.Errorf("a request with a list of %d, longer than its place: %w", count,
			driver.ErrBounds)
	case h.Paged && (h.EntryLen == 0 || h.EntryLen > PieceBytes ||
		uint64(count) > PieceBytes/h.EntryLen):
		return fmt.Errorf("a request for %d entries of %d bytes, at most %d in all: %w", count,
			h.EntryLen, PieceBytes, driver.ErrBounds)
	}
	h.Count = int(count)
	return nil
}

// ListDescs makes the hop one of the far ends of descriptors, which it writes into the slot's list.
// It returns how many bytes of the list they take.
func (h *Hop) ListDescs(list []byte, descs []driver.Desc) (n uint64) {
	for i := range descs {
		binary.LittleEndian.PutUint64(list[descBytes*i:], descs[i].Remote)
		binary.LittleEndian.PutUint64(list[descBytes*i+8:], descs[i].Len)
	}
	h.Count = len(descs)
	return uint64(descBytes * len(descs))
}

// ListEntries is ListDescs for the far ends of a pattern's entries.
func (h *Hop) ListEntries(list []byte, p *driver.Pattern) (n uint64) {
	for i, index := range p.Remote.List {
		binary.LittleEndian.PutUint32(list[4*i:], index)
	}
	h.Paged, h.Listed, h.Count = true, p.Remote.List != nil, p.Count
	h.EntryLen, h.Base, h.Stride = p.Run, p.Remote.Base, p.Remote.Stride
	return uint64(4 * len(p.Remote.List))
}

// ReadList reads the slot's list once: the peer can change it at any time. Local offsets count from
// the beginning of the slot.
func (h *Hop) ReadList(list []byte, descs []driver.Desc, indices []uint32) ([]driver.Desc,
	[]uint32, error) {
	if h.Paged {
		for i := 0; h.Listed && i < h.Count; i++ {
			indices = append(indices, binary.LittleEndian.Uint32(list[4*i:]))
		}
		return descs, indices, nil
	}
	sum := uint64(0)
	for i := range h.Count {
		d := driver.Desc{Remote: binary.LittleEndian.Uint64(list[descBytes*i:]),
			Len: binary.LittleEndian.Uint64(list[descBytes*i+8:])}
		if d.Len == 0 || d.Len > PieceBytes-sum {
			return descs, indices, fmt.Errorf("piece %d of a request is one of %d bytes, at most "+
				"%d in all: %w", i, d.Len, PieceBytes, driver.ErrBounds)
		}
		d.Local = sum
		sum += d.Len
		descs = append(descs, d)
	}
	return descs, indices, nil
}

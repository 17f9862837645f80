// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// The kinds of the messages between connected engines. A message is one byte, its kind, and then
// what stands behind the kind here; integers are little-endian. Requests go as notifications of a
// backend, and answers come back over the connection of the request (driver.Backend.Answer).
const (
	KindNotification = 0 // bytes for the program
	KindPart         = 1 // flags; a part of a notification that is too long for one message
	KindHello        = 2 // a Hello: the first message of a connection

	KindWindowAsk = 16 // nothing: the sender asks for staging memory
	KindWindow    = 17 // the answer: slots, and a description of its region, or why not
	KindPut       = 18 // a Hop: copy the bytes in the slot to the memory that the Hop names
	KindGet       = 19 // a Hop: copy from that memory into the slot
	KindWithdrawn = 20 // slot, number: do not begin that hop, or end it
	KindHopEnd    = 21 // the answer to each of these three: slot, number, outcome
)

// The flags of a part.
const (
	FirstPart = 1
	LastPart  = 2
	PartHead  = 2 // kind and flags
)

// Secret is 128 bits that an engine gives out to one peer alone.
type Secret [16]byte

// Hello begins a connection.
type Hello struct {
	ID   ID
	Show Secret // of the ticket that the receiver gave the sender; zero: it gave none
	Name string // of the engine, by its own account
}

// helloBytes is a hello without its name: kind, version, engine, secret.
const (
	helloVersion = 2
	helloBytes   = 1 + 1 + len(ID{}) + len(Secret{})
)

// Append appends the message.
func (h *Hello) Append(b []byte) []byte {
	b = append(b, KindHello, helloVersion)
	b = append(b, h.ID[:]...)
	b = append(b, h.Show[:]...)
	return append(b, h.Name...)
}

// ParseHello decodes a message. It reports whether that is a hello.
func ParseHello(b []byte) (h Hello, ok bool) {
	if len(b) < helloBytes || len(b) > helloBytes+NameMax || b[0] != KindHello ||
		b[1] != helloVersion {
		return h, false
	}
	copy(h.ID[:], b[2:])
	copy(h.Show[:], b[2+len(h.ID):])
	h.Name = string(b[helloBytes:])
	return h, CheckName(h.Name) == nil
}

// The shape of staging memory: slots of one piece and its list.
const (
	PieceBytes = 1 << 20 // of data in a slot
	ListBytes  = 64 << 10
	SlotBytes  = PieceBytes + ListBytes
	DescsMax   = ListBytes / descBytes // descriptors in a piece
	IndicesMax = ListBytes / 4         // indices in a piece
	descBytes  = 16
)

// Hop asks the peer to copy between a slot of its window and memory that it described. Where the
// bytes lie in that memory, Count descriptors in the slot's list say or, with Paged, the entries
// themselves: Count of one length, each at Base + index*Stride.
type Hop struct {
	Slot   uint16
	Number uint32 // of the piece in the slot
	Token  []byte // HopToken bytes

	Durable bool // of a put: the answer comes once the bytes would survive a loss of power
	Count   int
	Paged   bool // entries instead of descriptors
	Listed  bool // the slot's list has the indices of the entries; otherwise they count up from 0

	EntryLen, Base, Stride uint64 // bytes
}

// HopToken is the length of the token that a peer must show for a hop: secret, key and epoch.
const HopToken = 16 + 4

// HopName is the length of the name of a hop: slot and number.
const HopName = 2 + 4

const (
	hopBytes    = HopName + HopToken + 1 + 4 + 8 + 8 + 8
	flagPaged   = 1
	flagListed  = 2
	flagDurable = 4
)

// AppendName appends the name of the hop.
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

// ParseName reads the name of a hop.
func (h *Hop) ParseName(b []byte) (rest []byte, ok bool) {
	if len(b) < HopName {
		return nil, false
	}
	h.Slot = binary.LittleEndian.Uint16(b)
	h.Number = binary.LittleEndian.Uint32(b[2:])
	return b[HopName:], true
}

// Parse decodes a hop and bounds it by the size of a slot. The engine checks the bounds of the
// memory later.
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

// ListDescs writes the remote ranges of descriptors into the slot's list, and makes the hop one of
// these ranges. It returns how many bytes of the list they take.
func (h *Hop) ListDescs(list []byte, descs []driver.Desc) (n uint64) {
	for i := range descs {
		binary.LittleEndian.PutUint64(list[descBytes*i:], descs[i].Remote)
		binary.LittleEndian.PutUint64(list[descBytes*i+8:], descs[i].Len)
	}
	h.Count = len(descs)
	return uint64(descBytes * len(descs))
}

// ListEntries is ListDescs for the remote entries of a pattern.
func (h *Hop) ListEntries(list []byte, p *driver.Pattern) (n uint64) {
	for i, index := range p.Remote.List {
		binary.LittleEndian.PutUint32(list[4*i:], index)
	}
	h.Paged, h.Listed, h.Count = true, p.Remote.List != nil, p.Count
	h.EntryLen, h.Base, h.Stride = p.Run, p.Remote.Base, p.Remote.Stride
	return uint64(4 * len(p.Remote.List))
}

// ReadList reads the slot's list once, because the peer can change it at any time. The Local
// offsets of the descriptors count from the beginning of the slot.
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

// The outcomes by their code: 0 is success, and the last stands for all other errors.
var outcomes = []error{nil, driver.ErrAborted, driver.ErrRevoked, driver.ErrBounds,
	driver.ErrReadOnly, driver.ErrBadToken, driver.ErrClosed, driver.ErrFull,
	driver.ErrNotSupported, driver.ErrTimeout, driver.ErrNoRoute, driver.ErrCorrupt,
	driver.ErrFault, errFar}

var errFar = errors.New("the peer's engine failed")

const textMax = 200 // bytes of text of an error

// OutOfBounds is the code of ErrBounds: an outcome without text.
const OutOfBounds = 3

// AppendOutcome appends a code, 0 for nil, and the error's text.
func AppendOutcome(b []byte, err error) []byte {
	code := 0
	if err != nil {
		for code = 1; code < len(outcomes)-1; code++ {
			if errors.Is(err, outcomes[code]) {
				break
			}
		}
	}
	b = append(b, byte(code))
	if err != nil {
		text := err.Error()
		b = append(b, text[:min(len(text), textMax)]...)
	}
	return b
}

// ParseOutcome returns an error of the same kind and text.
func ParseOutcome(b []byte) error {
	if len(b) == 0 || int(b[0]) >= len(outcomes) || len(b) > 1+textMax {
		return fmt.Errorf("an answer of %d bytes that makes no sense: %w", len(b),
			driver.ErrCorrupt)
	}
	if b[0] == 0 {
		return nil
	}
	return &farError{string(b[1:]), outcomes[b[0]]}
}

// farError is an error of the peer, in its words.
type farError struct {
	text string
	is   error
}

func (e *farError) Error() string { return e.text }
func (e *farError) Unwrap() error { return e.is }

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// farHop asks the peer for a hop between a slot of its window and memory that it described.
type farHop struct {
	slot   uint16
	number uint32
	token  []byte

	durable       bool // of a put: the answer comes once the bytes would survive a loss of power
	paged, listed bool // listed: indices lie in the slot's list
	count         int  // descriptors in the slot's list, unless paged
	pages         Pages
}

const (
	nameBytes   = 2 + 4
	hopBytes    = nameBytes + farToken + 1 + 4 + 8 + 8 + 8
	flagPaged   = 1
	flagListed  = 2
	flagDurable = 4
)

func (h *farHop) appendName(b []byte) []byte {
	b = binary.LittleEndian.AppendUint16(b, h.slot)
	return binary.LittleEndian.AppendUint32(b, h.number)
}

func (h *farHop) append(b []byte) []byte {
	b = append(h.appendName(b), h.token...)
	flags, count := byte(0), h.count
	if h.paged {
		flags, count = flagPaged, h.pages.Count
	}
	if h.listed {
		flags |= flagListed
	}
	if h.durable {
		flags |= flagDurable
	}
	b = binary.LittleEndian.AppendUint32(append(b, flags), uint32(count))
	b = binary.LittleEndian.AppendUint64(b, h.pages.EntryLen)
	b = binary.LittleEndian.AppendUint64(b, h.pages.RemoteBase)
	return binary.LittleEndian.AppendUint64(b, h.pages.RemoteStride)
}

// parseName reads what names a hop.
func (h *farHop) parseName(b []byte) (rest []byte, ok bool) {
	if len(b) < nameBytes {
		return nil, false
	}
	h.slot = binary.LittleEndian.Uint16(b)
	h.number = binary.LittleEndian.Uint32(b[2:])
	return b[nameBytes:], true
}

// parse reads a hop and bounds it by what a slot holds. The memory's bounds are for later.
func (h *farHop) parse(b []byte) error {
	rest, ok := h.parseName(b)
	if !ok || len(b) != hopBytes {
		return fmt.Errorf("a request of %d bytes, not %d: %w", len(b), hopBytes, ErrCorrupt)
	}
	h.token, rest = rest[:farToken], rest[farToken:]
	flags, count := rest[0], binary.LittleEndian.Uint32(rest[1:])
	h.paged, h.listed, h.durable = flags&flagPaged != 0, flags&flagListed != 0,
		flags&flagDurable != 0
	h.pages = Pages{EntryLen: binary.LittleEndian.Uint64(rest[5:]),
		RemoteBase:   binary.LittleEndian.Uint64(rest[13:]),
		RemoteStride: binary.LittleEndian.Uint64(rest[21:])}
	switch {
	case flags > flagPaged|flagListed|flagDurable, h.listed && !h.paged, count == 0:
		return fmt.Errorf("a request with flags %#x for %d pieces: %w", flags, count, ErrCorrupt)
	case !h.paged && count > listMax, h.listed && count > listBytes/4:
		return fmt.Errorf("a request with a list of %d, longer than its place: %w", count,
			ErrBounds)
	case h.paged && (h.pages.EntryLen == 0 || h.pages.EntryLen > pieceBytes ||
		uint64(count) > pieceBytes/h.pages.EntryLen):
		return fmt.Errorf("a request for %d entries of %d bytes, at most %d in all: %w", count,
			h.pages.EntryLen, pieceBytes, ErrBounds)
	}
	if h.paged {
		h.pages.Count = int(count)
	} else {
		h.count = int(count)
	}
	return nil
}

// readList reads the slot's list once: the peer can change it at any time.
func (h *farHop) readList(list []byte, descs []driver.Desc, indices []uint32) ([]driver.Desc,
	[]uint32, error) {
	if h.paged {
		for i := 0; h.listed && i < h.pages.Count; i++ {
			indices = append(indices, binary.LittleEndian.Uint32(list[4*i:]))
		}
		return descs, indices, nil
	}
	sum := uint64(0)
	for i := range h.count {
		d := driver.Desc{Remote: binary.LittleEndian.Uint64(list[listEntry*i:]),
			Len: binary.LittleEndian.Uint64(list[listEntry*i+8:])}
		if d.Len == 0 || d.Len > pieceBytes-sum {
			return descs, indices, fmt.Errorf("piece %d of a request is one of %d bytes, at most "+
				"%d in all: %w", i, d.Len, pieceBytes, ErrBounds)
		}
		d.Local = sum
		sum += d.Len
		descs = append(descs, d)
	}
	return descs, indices, nil
}

// The outcomes as they go over the wire, by index: 0 is success, the last everything else.
var farErrors = []error{nil, ErrAborted, ErrRevoked, ErrBounds, driver.ErrReadOnly,
	driver.ErrBadToken,
	ErrClosed, ErrFull, ErrNotSupported, ErrTimeout, ErrNoRoute, ErrCorrupt, errFar}

var errFar = errors.New("the peer's engine failed")

const (
	whyMax        = 200 // bytes of text of an error
	outcomeBounds = 3   // the index of ErrBounds
)

func appendOutcome(b []byte, err error) []byte {
	code := 0
	if err != nil {
		for code = 1; code < len(farErrors)-1; code++ {
			if errors.Is(err, farErrors[code]) {
				break
			}
		}
	}
	b = append(b, byte(code))
	if err != nil {
		text := err.Error()
		b = append(b, text[:min(len(text), whyMax)]...)
	}
	return b
}

func parseOutcome(b []byte) error {
	if len(b) == 0 || int(b[0]) >= len(farErrors) || len(b) > 1+whyMax {
		return fmt.Errorf("an answer of %d bytes that makes no sense: %w", len(b), ErrCorrupt)
	}
	if b[0] == 0 {
		return nil
	}
	return &farError{string(b[1:]), farErrors[b[0]]}
}

// farError is what went wrong at the peer, in its words.
type farError struct {
	text string
	is   error
}

func (e *farError) Error() string { return e.text }
func (e *farError) Unwrap() error { return e.is }

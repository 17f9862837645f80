// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"encoding/binary"
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// A connection carries frames. A frame is a head of headBytes and a body, whose length the head
// has: for kindWrite and kindRead a table or a fragment, then the payload. Numbers are
// little-endian.
const (
	wireVersion = 5
	headBytes   = 48
	entryBytes  = 12 // an entry of a table: 8 bytes of offset, 4 of length

	// The payload of a frame. It bounds how long a small frame waits behind another, and how much
	// an owner that is stopped while a payload lands still puts in place.
	partBytes    = 512 << 10
	entriesMax   = 1024    // of a table: 12 KiB
	bodyMax      = 2 << 10 // of the other kinds
	messageLimit = 64 << 10
)

// The kinds, and which end sends them. The initiator opened the connection, the owner has the
// memory.
const (
	kindHello     = 1 + iota // initiator: the first frame of a peer
	kindJoin                 // initiator: one more connection of that peer
	kindWelcome              // owner: to both
	kindReady                // initiator: all connections are there
	kindImport               // initiator: a token
	kindImported             // owner: the memory of that token
	kindPing                 // initiator: asks for a pong
	kindPong                 // owner
	kindChallenge            // owner: asks whether stale frames are still wanted
	kindConfirm              // initiator: they are
	kindCredit               // both: room for so many more messages
	kindAnswer               // owner: a message of Backend.Answer
	kindStop                 // initiator: land nothing any more
	kindStopped              // owner: nothing of this peer lands any more
	kindWrite                // initiator: a table, and the bytes for it
	kindRead                 // initiator: a table
	kindData                 // owner: the bytes of a Read; its kindAck follows
	kindAck                  // owner: a part, or a notification, is done
	kindNotif                // initiator: a message, due when the parts of its batch have landed
	kindVoid                 // initiator: no notification follows for this batch
	kindsEnd
)

// Flags of a head.
const (
	flagReadOnly = 1 << iota // kindImported
	flagPattern              // kindWrite, kindRead: a fragment in place of a table
)

// header is the head of a frame. What a field means depends on the kind.
type header struct {
	length uint32 // of what follows
	kind   uint8
	flags  uint8
	status uint8 // how a request ended: session.Status
	// entries of the table, or slots of the list; kindNotif, kindVoid: parts of the batch
	count  uint32
	key    uint32 // of memory of the owner
	ticket uint64 // of that memory; kindImport: an epoch; kindHello and the like: an age limit
	id     uint64 // of a part or a request; the answer repeats it
	// number of the notification, or of that which follows a part's batch, from 1 on; 0: none
	// follows. kindImported: bytes of the memory
	message uint64
	// nanoseconds of the owner's clock, not later than the frame was sent: see ownerTime; 0: not
	// known
	stamp int64
}

func (h *header) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, h.length)
	b = append(b, wireVersion, h.kind, h.flags, h.status)
	b = binary.LittleEndian.AppendUint32(b, h.count)
	b = binary.LittleEndian.AppendUint32(b, h.key)
	b = binary.LittleEndian.AppendUint64(b, h.ticket)
	b = binary.LittleEndian.AppendUint64(b, h.id)
	b = binary.LittleEndian.AppendUint64(b, h.message)
	return binary.LittleEndian.AppendUint64(b, uint64(h.stamp))
}

// decode decodes what a peer sent, which may be anything, and checks all lengths.
func (h *header) decode(b *[headBytes]byte) error {
	h.length = binary.LittleEndian.Uint32(b[0:])
	h.kind, h.flags, h.status = b[5], b[6], b[7]
	if b[4] != wireVersion {
		return fmt.Errorf("the peer speaks version %d, ours is %d: use the same release on "+
			"both sides: %w",
			b[4], wireVersion, driver.ErrVersion)
	}
	h.count = binary.LittleEndian.Uint32(b[8:])
	h.key = binary.LittleEndian.Uint32(b[12:])
	h.ticket = binary.LittleEndian.Uint64(b[16:])
	h.id = binary.LittleEndian.Uint64(b[24:])
	h.message = binary.LittleEndian.Uint64(b[32:])
	h.stamp = int64(binary.LittleEndian.Uint64(b[40:]))
	if !h.isValid() {
		return fmt.Errorf("frame of kind %d with %d entries and %d bytes: %w",
			h.kind, h.count, h.length, driver.ErrCorrupt)
	}
	return nil
}

// isValid reports whether the lengths are within their bounds and agree with each other.
func (h *header) isValid() bool {
	switch h.kind {
	case kindWrite:
		return h.hasTable() && h.length > h.table() && h.length-h.table() <= partBytes
	case kindRead:
		return h.hasTable() && h.length == h.table()
	case kindData:
		return h.length > 0 && h.length <= partBytes
	case kindNotif, kindAnswer:
		return h.length <= messageLimit
	case kindHello, kindJoin, kindWelcome, kindImport:
		return h.length <= bodyMax
	}
	return h.kind > 0 && h.kind < kindsEnd && h.length == 0
}

func (h *header) hasTable() bool {
	if h.flags&flagPattern != 0 {
		return h.count <= slotsMax
	}
	return h.count > 0 && h.count <= entriesMax
}

// table returns the length of the table or fragment, for a header that hasTable has accepted.
func (h *header) table() uint32 {
	if h.flags&flagPattern != 0 {
		return patternBytes + h.count*slotBytes
	}
	return h.count * entryBytes
}

// bodyBytes returns how many bytes behind the head the receiver reads as a whole. The rest is
// payload, which lands as it comes.
func (h *header) bodyBytes() int {
	switch h.kind {
	case kindWrite:
		return int(h.table())
	case kindData:
		return 0
	}
	return int(h.length)
}

func appendEntry(b []byte, off, n uint64) []byte {
	return binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint64(b, off), uint32(n))
}

func entryAt(table []byte, i int) (off, n uint64) {
	e := table[i*entryBytes:][:entryBytes]
	return binary.LittleEndian.Uint64(e), uint64(binary.LittleEndian.Uint32(e[8:]))
}

// tableBytes adds the lengths of a table up. ok is false if an entry is empty or not within size.
func tableBytes(table []byte, size uint64) (sum uint64, ok bool) {
	for i := range len(table) / entryBytes {
		off, n := entryAt(table, i)
		if n == 0 || n > size || off > size-n {
			return 0, false
		}
		sum += n // at most entriesMax times 4 GiB
	}
	return sum, true
}

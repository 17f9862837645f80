// SPDX-License-Identifier: Apache-2.0

package session

import (
	"encoding/binary"
	"errors"

	"github.com/sluicehq/sluice/driver"
)

// MessageReader decodes the fields of a message in order. Numbers are little-endian. After a field
// that is missing or wrong, all further fields are zero: the caller checks once, at the end, with
// Done.
type MessageReader struct {
	rest   []byte
	failed bool
}

// ReadMessage returns a reader that starts at the first byte of b.
func ReadMessage(b []byte) MessageReader { return MessageReader{rest: b} }

// Bytes returns the next n bytes, which alias the message.
func (r *MessageReader) Bytes(n int) []byte {
	if n < 0 || n > len(r.rest) {
		r.Fail()
		return nil
	}
	b := r.rest[:n:n]
	r.rest = r.rest[n:]
	return b
}

// Rest returns how many bytes are left.
func (r *MessageReader) Rest() int { return len(r.rest) }

// Fail makes Done return false.
func (r *MessageReader) Fail() { r.failed, r.rest = true, nil }

// Failed reports whether a field was missing or wrong.
func (r *MessageReader) Failed() bool { return r.failed }

// Uint8 returns one byte.
func (r *MessageReader) Uint8() uint8 {
	if b := r.Bytes(1); b != nil {
		return b[0]
	}
	return 0
}

// Uint16 returns two bytes.
func (r *MessageReader) Uint16() uint16 {
	if b := r.Bytes(2); b != nil {
		return binary.LittleEndian.Uint16(b)
	}
	return 0
}

// Uint32 returns four bytes.
func (r *MessageReader) Uint32() uint32 {
	if b := r.Bytes(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

// Uint64 returns eight bytes.
func (r *MessageReader) Uint64() uint64 {
	if b := r.Bytes(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// Flag returns a byte that is 0 or 1.
func (r *MessageReader) Flag() bool {
	b := r.Uint8()
	r.failed = r.failed || b > 1
	return b == 1
}

// Done reports whether all fields were there and no byte is left.
func (r *MessageReader) Done() bool { return !r.failed && len(r.rest) == 0 }

// FlagByte returns the byte that Flag decodes.
func FlagByte(set bool) byte {
	if set {
		return 1
	}
	return 0
}

// Status is the owner's answer to a request for memory.
type Status uint8

// The values of Status.
const (
	StatusOK Status = iota
	StatusRevoked
	StatusBadToken
	StatusClosed
	StatusFull
	StatusFailed
	StatusBounds
	StatusFault
)

var statusErrors = [...]error{
	StatusOK: nil, StatusRevoked: driver.ErrRevoked, StatusBadToken: driver.ErrBadToken,
	StatusClosed: driver.ErrPeerLost, StatusFull: driver.ErrFull, StatusFailed: driver.ErrCorrupt,
	StatusBounds: driver.ErrBounds, StatusFault: driver.ErrFault,
}

// Err returns the error that the status stands for.
func (s Status) Err() error {
	if int(s) >= len(statusErrors) {
		return driver.ErrCorrupt
	}
	return statusErrors[s]
}

// StatusOf returns the status that stands for an error.
func StatusOf(err error) Status {
	for s, e := range statusErrors {
		if e == nil && err == nil || e != nil && errors.Is(err, e) {
			return Status(s)
		}
	}
	return StatusFailed
}

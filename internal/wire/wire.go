// SPDX-License-Identifier: Apache-2.0

// Package wire encodes what engines tell each other: a Description, by which they meet, and the
// messages between engines that are connected (message.go). A peer may have made up what a decoder
// reads, so the decoder bounds it and never panics; the engine decides whether it does what a
// message asks for.
//
// A Description has a magic number, a version and a CRC-32C. Its integers are unsigned varints in
// their one shortest form, so that a value has exactly one encoding, except for ranges.
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/sluicehq/sluice/driver"
)

// Version is the version of the format: this package writes and reads no other.
const Version = 4

const (
	magic       = "SLUC"
	headLen     = len(magic) + 1
	checksumLen = 4
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// seal appends the checksum of b[start:].
func seal(b []byte, start int) []byte {
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b[start:], castagnoli))
}

// open checks the frame and returns the body.
func open(b []byte) ([]byte, error) {
	if len(b) < headLen+checksumLen || string(b[:len(magic)]) != magic {
		return nil, fmt.Errorf("neither a description nor the token of a lease: %d bytes "+
			"without the mark %q: %w", len(b), magic, driver.ErrCorrupt)
	}
	if v := b[len(magic)]; v != Version {
		return nil, fmt.Errorf("description has version %d, this program reads %d: use the same "+
			"release on both sides: %w", v, Version, driver.ErrVersion)
	}
	body, sum := b[:len(b)-checksumLen], binary.LittleEndian.Uint32(b[len(b)-checksumLen:])
	if crc32.Checksum(body, castagnoli) != sum {
		return nil, fmt.Errorf("description of %d bytes is cut or altered: %w", len(b),
			driver.ErrCorrupt)
	}
	return body[headLen:], nil
}

// reader decodes a body. After the first error all calls return zero, so that a decoder checks for
// an error once, at the end.
type reader struct {
	rest   []byte
	spare  uint64 // bytes that front may still repeat
	ranged uint64 // ranges so far
	err    error
}

// A body may repeat, by front coding, this many times its own bytes: several times what names and
// tokens of real regions need.
const repeatsMax = 16

var errShort = errors.New("ends early")

func (r *reader) fail(err error) {
	if r.err == nil {
		r.err = err
	}
	r.rest = nil
}

// uvarint decodes an integer of at most limit.
func (r *reader) uvarint(limit uint64) uint64 {
	v, n := binary.Uvarint(r.rest)
	switch {
	case r.err != nil:
		return 0
	case n <= 0:
		r.fail(errShort)
		return 0
	case n > 1 && r.rest[n-1] == 0:
		r.fail(errors.New("has an integer in a longer form than it needs"))
		return 0
	case v > limit:
		r.fail(fmt.Errorf("has %d where at most %d can stand", v, limit))
		return 0
	}
	r.rest = r.rest[n:]
	return v
}

// bytes returns the next n bytes, which alias the input.
func (r *reader) bytes(n uint64) []byte {
	if r.err != nil {
		return nil
	}
	if n > uint64(len(r.rest)) {
		r.fail(errShort)
		return nil
	}
	b := r.rest[:n:n]
	r.rest = r.rest[n:]
	return b
}

// block decodes a length of at most limit, and returns as many bytes.
func (r *reader) block(limit uint64) []byte { return r.bytes(r.uvarint(limit)) }

// front decodes bytes that are front-coded after prev.
func (r *reader) front(prev []byte, limit uint64) []byte {
	shared := r.uvarint(uint64(len(prev)))
	tail := r.block(limit - min(shared, limit))
	if r.err != nil {
		return nil
	}
	if len(tail) > 0 && shared < uint64(len(prev)) && tail[0] == prev[shared] {
		r.fail(errors.New("shares less than it could"))
		return nil
	}
	if shared == 0 {
		return tail
	}
	if shared > r.spare {
		r.fail(errors.New("repeats far more than it says"))
		return nil
	}
	r.spare -= shared
	return append(append(make([]byte, 0, shared+uint64(len(tail))), prev[:shared]...), tail...)
}

func appendBlock[T ~string | ~[]byte](dst []byte, b T) []byte {
	return append(binary.AppendUvarint(dst, uint64(len(b))), b...)
}

// appendFrontCoded appends how many first bytes of b are those of prev, and the rest of b.
func appendFrontCoded[T ~string | ~[]byte](dst []byte, prev, b T) []byte {
	n := 0
	for n < len(prev) && n < len(b) && prev[n] == b[n] {
		n++
	}
	return appendBlock(binary.AppendUvarint(dst, uint64(n)), b[n:])
}

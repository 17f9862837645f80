// SPDX-License-Identifier: Apache-2.0

package digest

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
)

// Version is the version of the definition of digests. Digests of other versions differ.
const Version = 1

// CellMax bounds the bytes of a cell.
const CellMax = 1 << 20

// Seed chooses the keys of a digest. Both sides of a comparison need the same one. Draw it at
// random for each hand-over, so that no content has the same blind spots twice.
type Seed [16]byte

// Key is the key by which the cells of one part are digested. It never changes; any goroutine may
// use it.
type Key struct {
	words []uint64 // a pair of words each, the first in the low half; lane 1, then lane 2
	s     [2]uint64
	cell  int
}

// NewKey derives the key of cells of that many bytes, 1 to CellMax. K is the key stream of
// AES-128 in counter mode from 0, under the first half of SHA-256 of
//
//	seed, version u16, cell u64, dtype
//
// and S the last two words of 64 bits of SHA-256 of the same, a zero byte and the name of the
// part. All numbers are little-endian.
func NewKey(seed Seed, part, dtype string, cell uint64) (*Key, error) {
	if cell < 1 || cell > CellMax {
		return nil, fmt.Errorf("digest: cells of %d bytes, want 1 to %d", cell, CellMax)
	}
	text := binary.LittleEndian.AppendUint16(seed[:len(seed):len(seed)], Version)
	text = append(binary.LittleEndian.AppendUint64(text, cell), dtype...)
	shared := sha256.Sum256(text)
	own := sha256.Sum256(append(append(text, 0), part...))
	block, err := aes.NewCipher(shared[:16])
	if err != nil {
		return nil, fmt.Errorf("digest: %w", err)
	}
	pairs := (cell + 7) / 8
	stream := make([]byte, 2*8*pairs)
	cipher.NewCTR(block, make([]byte, aes.BlockSize)).XORKeyStream(stream, stream)
	k := &Key{words: make([]uint64, 2*pairs), cell: int(cell), s: [2]uint64{
		binary.LittleEndian.Uint64(own[16:]), binary.LittleEndian.Uint64(own[24:])}}
	for i := range k.words {
		k.words[i] = binary.LittleEndian.Uint64(stream[8*i:])
	}
	return k, nil
}

// Cell is the bytes of a cell.
func (k *Key) Cell() uint64 { return uint64(k.cell) }

// Lane returns K and S of a lane, 0 or 1, for sums outside of this package. The pairs of words are
// not the caller's to write.
func (k *Key) Lane(v int) (pairs []uint64, s uint64) {
	n := len(k.words) / 2
	return k.words[v*n:][:n:n], k.s[v]
}

// add takes one cell in.
func (k *Key) add(d *Digest, b []byte, coord uint64) {
	var a, c uint64
	n := len(k.words) / 2
	first, second := k.words[:n], k.words[n:]
	for j := range first {
		var m uint64
		if len(b) >= 8 {
			m = binary.LittleEndian.Uint64(b)
			b = b[8:]
		} else {
			for i := len(b) - 1; i >= 0; i-- {
				m = m<<8 | uint64(b[i])
			}
		}
		a += product(m, first[j])
		c += product(m, second[j])
	}
	d.A += mix64(a ^ mix64(k.s[0]^coord))
	d.B += mix64(c ^ mix64(k.s[1]^coord))
	d.Cells++
}

func product(m, k uint64) uint64 {
	return uint64(uint32(m)+uint32(k)) * uint64(uint32(m>>32)+uint32(k>>32))
}

func mix64(x uint64) uint64 {
	x = (x ^ x>>33) * 0xff51afd7ed558ccd
	x = (x ^ x>>33) * 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}

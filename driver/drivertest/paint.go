// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
)

// paint fills p with bytes that depend on seed and position, so that a range
// that landed elsewhere, twice, or half differs from what was expected. The race
// detector would be slow here and has nothing to find.
//
//go:norace
func paint(p []byte, seed uint64) {
	x := seed*0x9e3779b97f4a7c15 + 1
	for ; len(p) >= 8; p = p[8:] {
		x = next(x)
		binary.LittleEndian.PutUint64(p, x)
	}
	var last [8]byte
	binary.LittleEndian.PutUint64(last[:], next(x))
	copy(p, last[:])
}

// next is a step of Marsaglia's xorshift.
func next(x uint64) uint64 {
	x ^= x << 13
	x ^= x >> 7
	return x ^ x<<17
}

// painted returns n painted bytes.
func painted(n, seed uint64) []byte {
	p := make([]byte, n)
	paint(p, seed)
	return p
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// digest is a CRC-32C: processors have an instruction for it, and a suite that compares all
// memory after every step does little else. No backend here forges bytes.
func digest(p []byte) []byte {
	return binary.LittleEndian.AppendUint32(nil, crc32.Checksum(p, castagnoli))
}

// difference describes where got departs from want.
func difference(got, want []byte) string {
	first, last, count := -1, 0, 0
	for i := range want {
		if i >= len(got) || got[i] != want[i] {
			if first < 0 {
				first = i
			}
			last = i
			count++
		}
	}
	if first < 0 {
		return "no difference now: the bytes changed while they were compared"
	}
	return fmt.Sprintf("%d bytes differ between %d and %d (got %x.., want %x..)",
		count, first, last, window(got, first), window(want, first))
}

func window(p []byte, at int) []byte {
	return p[min(at, len(p)):min(at+8, len(p))]
}

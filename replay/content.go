// SPDX-License-Identifier: Apache-2.0

// This file computes the bytes of a cell of a KV cache from the cell's identity, and checks whether
// given bytes are those of a given cell.
//
// All words of eight bytes of a cell differ from each other, so the checker notices bytes at a
// wrong place or offset, bytes that are missing, and bytes of another cell. The code that fills a
// cell and the code that checks it share nothing but the definition: word i of a cell is
// first + i x step modulo 2^64, little-endian.

package replay

import "encoding/binary"

// cellID identifies a cell of a KV cache or, where whole blocks are compared, one part (such as
// "k") of one layer of a block.
type cellID struct {
	Request     uint64 // or the hash of a block
	Part        uint64 // see partNumber
	Layer, Unit int
	Token       uint64
}

// partNumber hashes the name of a part.
func partNumber(name string) uint64 {
	h := uint64(len(name))
	for i := range len(name) {
		h = mix(h ^ uint64(name[i])<<56)
	}
	return h
}

// mix is the finaliser of splitmix64: every bit of the result depends on every
// bit of x.
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}

// words returns the first word of the cell and the step from each to the next.
func (c *cellID) words() (first, step uint64) {
	first = mix(c.Request*0x9e3779b97f4a7c15 ^ c.Part)
	first = mix(first ^ uint64(c.Layer)<<44 ^ uint64(c.Unit)<<24 ^ c.Token)
	return first, mix(first^0xd1b54a32d192ed03) | 1
}

// fill writes the bytes of a cell.
func (c *cellID) fill(dst []byte) {
	v, step := c.words()
	for len(dst) >= 32 {
		d := (*[32]byte)(dst)
		binary.LittleEndian.PutUint64(d[0:], v)
		binary.LittleEndian.PutUint64(d[8:], v+step)
		binary.LittleEndian.PutUint64(d[16:], v+2*step)
		binary.LittleEndian.PutUint64(d[24:], v+3*step)
		v += 4 * step
		dst = dst[32:]
	}
	for len(dst) >= 8 {
		binary.LittleEndian.PutUint64(dst, v)
		v += step
		dst = dst[8:]
	}
	var word [8]byte
	binary.LittleEndian.PutUint64(word[:], v)
	copy(dst, word[:])
}

// wrong counts the bytes of b that are not those of the cell.
func (c *cellID) wrong(b []byte) (n uint64) {
	v, step := c.words()
	for len(b) >= 8 {
		if got := binary.LittleEndian.Uint64(b); got != v {
			n += differing(got ^ v)
		}
		v += step
		b = b[8:]
	}
	if len(b) > 0 {
		var word [8]byte
		copy(word[:], b)
		n += differing((binary.LittleEndian.Uint64(word[:]) ^ v) & (1<<(8*len(b)) - 1))
	}
	return n
}

// differing counts the bytes that are not zero.
func differing(v uint64) (n uint64) {
	for ; v != 0; v >>= 8 {
		if v&0xff != 0 {
			n++
		}
	}
	return n
}

// countWrong counts the bytes of b that differ from expected.
func countWrong(b []byte, expected byte) (n uint64) {
	want := uint64(expected) * 0x0101010101010101
	for len(b) >= 8 {
		if got := binary.LittleEndian.Uint64(b); got != want {
			n += differing(got ^ want)
		}
		b = b[8:]
	}
	for _, got := range b {
		if got != expected {
			n++
		}
	}
	return n
}

// SPDX-License-Identifier: Apache-2.0

// Package content makes the bytes of KV blocks out of a block's hash and a layer,
// and tells whether bytes are the ones of a given block and layer.
//
// Every eight bytes of a layer of a block differ from every other eight, so a
// piece that lies in the wrong place, at the wrong offset, or only in part shows
// up, and so does one of another block or layer. The maker and the checker share
// nothing but the definition: word i of a layer is first + i x step modulo 2^64,
// little-endian.
package content

import (
	"encoding/binary"
	"hash/crc32"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// seeds returns the first word and the step of a layer of a block. The step is
// odd, so no word repeats within 2^64 of them.
func seeds(hash uint64, layer int) (first, step uint64) {
	first = mix(hash*0x9e3779b97f4a7c15 + uint64(layer) + 1)
	return first, mix(first^0xd1b54a32d192ed03) | 1
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

// Fill writes the bytes [off, off+len(dst)) of a layer of a block. off must be a
// multiple of 8.
func Fill(dst []byte, hash uint64, layer int, off uint64) {
	first, step := seeds(hash, layer)
	v := first + off/8*step
	for len(dst) >= 64 {
		d := (*[64]byte)(dst)
		binary.LittleEndian.PutUint64(d[0:], v)
		binary.LittleEndian.PutUint64(d[8:], v+step)
		binary.LittleEndian.PutUint64(d[16:], v+2*step)
		binary.LittleEndian.PutUint64(d[24:], v+3*step)
		binary.LittleEndian.PutUint64(d[32:], v+4*step)
		binary.LittleEndian.PutUint64(d[40:], v+5*step)
		binary.LittleEndian.PutUint64(d[48:], v+6*step)
		binary.LittleEndian.PutUint64(d[56:], v+7*step)
		v += 8 * step
		dst = dst[64:]
	}
	var word [8]byte
	for len(dst) > 0 {
		binary.LittleEndian.PutUint64(word[:], v)
		dst = dst[copy(dst, word[:]):]
		v += step
	}
}

// Digest continues a CRC-32C over bytes as they lie in memory; begin with 0.
func Digest(crc uint32, b []byte) uint32 { return crc32.Update(crc, castagnoli, b) }

// scratchWords is small enough for the first-level cache.
const scratchWords = 1 << 10 // 8 KiB

// Checker computes what digests must be. It keeps a scratch buffer, so it is
// not for several goroutines at once.
type Checker struct {
	scratch [scratchWords * 8]byte
}

// Want returns the CRC-32C of the first n bytes of a layer of a block.
func (c *Checker) Want(hash uint64, layer int, n uint64) uint32 {
	first, step := seeds(hash, layer)
	crc := uint32(0)
	for i := uint64(0); i*8 < n; i += scratchWords {
		for j := range uint64(scratchWords) {
			binary.LittleEndian.PutUint64(c.scratch[j*8:][:8], first+(i+j)*step)
		}
		crc = crc32.Update(crc, castagnoli, c.scratch[:min(n-i*8, scratchWords*8)])
	}
	return crc
}

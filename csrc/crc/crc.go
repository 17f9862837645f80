// SPDX-License-Identifier: Apache-2.0

// Package crc computes CRC-32C at the speed of memory: in C where the processor multiplies
// vectors without carries (VPCLMULQDQ) and that proves to be faster, else as hash/crc32 does, which
// knows the instructions of amd64 and arm64.
package crc

import (
	"hash/crc32"
	"sync"
	"time"
)

// far is from how many bytes on a call of C is worth its crossing.
const far = 8 << 10

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Checksum returns the CRC-32C of p. All functions here may be called by any goroutine. In memory
// that is gone they panic, in C as in Go: see package memfault.
func Checksum(p []byte) uint32 { return Update(0, p) }

// Update returns the CRC-32C of what has the CRC sum, and p behind it.
func Update(sum uint32, p []byte) uint32 {
	if len(p) < far {
		return crc32.Update(sum, castagnoli, p)
	}
	return best()(sum, p)
}

type way func(sum uint32, p []byte) uint32

func ofGo(sum uint32, p []byte) uint32 { return crc32.Update(sum, castagnoli, p) }

// best is the fastest way of this machine, measured when it is first asked for: in some 0.1 ms.
var best = sync.OnceValue(func() way {
	p := make([]byte, 8*far)
	least := time.Duration(1<<63 - 1)
	var first way
	for _, w := range append(ways(), ofGo) { // of equals, Go's needs no crossing
		took := time.Duration(1<<63 - 1)
		for range 4 {
			begin := time.Now()
			w(0, p)
			took = min(took, time.Since(begin))
		}
		if took <= least {
			first, least = w, took
		}
	}
	return first
})

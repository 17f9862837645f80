// SPDX-License-Identifier: Apache-2.0

package digest

import (
	"hash/crc32"
	"math"
	"sync"
	"time"
)

// crcCrossing is the number of bytes from which on a call of C is faster than Go.
const crcCrossing = 8 << 10

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// CRC32C returns the CRC-32C of p: in C where the processor multiplies vectors without carries
// (VPCLMULQDQ) and that proves to be faster, else as hash/crc32 does. Any goroutine may call it. In
// memory that is gone it panics, in C as in Go: see hostmem.CatchFault.
func CRC32C(p []byte) uint32 { return updateCRC32C(0, p) }

// updateCRC32C returns the CRC-32C of some bytes, whose CRC is sum, followed by p.
func updateCRC32C(sum uint32, p []byte) uint32 {
	if len(p) < crcCrossing {
		return crc32.Update(sum, castagnoli, p)
	}
	return bestCRC()(sum, p)
}

// crcWay is an implementation of updateCRC32C.
type crcWay func(sum uint32, p []byte) uint32

func crcOfGo(sum uint32, p []byte) uint32 { return crc32.Update(sum, castagnoli, p) }

// bestCRC returns the fastest implementation on this machine. The first call measures them, in some
// 0.1 ms, with bytes in the caches. There C and Go are often equally fast, but from memory Go,
// which reads three places at once, was measured at half the speed. So Go must be faster by a
// third.
var bestCRC = sync.OnceValue(func() crcWay {
	p := make([]byte, 8*crcCrossing)
	first, least := crcWay(crcOfGo), timeOf(crcOfGo, p)*4/3
	for _, w := range crcWays() {
		if took := timeOf(w, p); took < least {
			first, least = w, took
		}
	}
	return first
})

// timeOf returns the shortest time of four runs.
func timeOf(w crcWay, p []byte) time.Duration {
	least := time.Duration(math.MaxInt64)
	for range 4 {
		begin := time.Now()
		w(0, p)
		least = min(least, time.Since(begin))
	}
	return least
}

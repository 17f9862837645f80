// SPDX-License-Identifier: Apache-2.0

package ring

import (
	"sync/atomic"
	"unsafe"
)

const (
	seatsMax   = 64
	objectsMax = 1 << 20
	pageBytes  = 4096
)

// head is the beginning of the table. The writer alone can write to the table.
type head struct {
	waits atomic.Uint32 // a Reserve waits for room: who lets go of an object rings
	_     uint32
	// seats has who sits at each: a reader whose number is not there has lost its seat.
	seats [seatsMax]atomic.Uint64
	_     [7]uint64
}

// row tells where an object lies. What stands behind generation changes only while that is 0.
type row struct {
	generation atomic.Uint64 // 0: there is no object
	at, length uint64
	sum        uint32 // CRC-32C, if the writer keeps them
	_          uint32
}

// word is what a reader says of an object. It alone writes there.
type word struct{ holds, reads atomic.Uint32 }

const (
	headBytes = uint64(unsafe.Sizeof(head{}))
	rowBytes  = uint64(unsafe.Sizeof(row{}))
	wordBytes = uint64(unsafe.Sizeof(word{}))
)

var _ [64 * 9]byte = [unsafe.Sizeof(head{})]byte{}

func tableBytes(objects uint64) uint64 { return wholePages(headBytes + objects*rowBytes) }
func wordsBytes(objects uint64) uint64 { return wholePages(objects * wordBytes) }
func wholePages(n uint64) uint64       { return (n + pageBytes - 1) &^ (pageBytes - 1) }

func asTable(mem []byte, objects uint64) (*head, []row) {
	at := unsafe.Pointer(unsafe.SliceData(mem))
	return (*head)(at), unsafe.Slice((*row)(unsafe.Add(at, headBytes)), objects)
}

func asWords(mem []byte, objects uint64) []word {
	return unsafe.Slice((*word)(unsafe.Pointer(unsafe.SliceData(mem))), objects)
}

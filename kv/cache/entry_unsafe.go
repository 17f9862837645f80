// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"unsafe"
)

// entry is what the cache knows of one block. The entries are the table of the memory file, so that
// a process that attaches to the file after a kill finds them; of those fields only the ones before
// space, and space itself, are read then. It has 64 bytes, in which no line of the processor's
// cache is shared.
type entry struct {
	key   Key    // of the block
	sum   uint32 // of the record, see sumOf: stored last, taken away first; 0: nothing is in memory
	crc   uint32 // CRC-32C of the bytes
	size  uint32 // bytes
	slot  uint32 // in memory, in granules; none: it is not there
	space uint16 // number of the namespace
	state state
	flags uint8
	pins  uint32 // loads, stores and Pins that use the slot; it is not used again before 0

	marks  [tiers]uint8 // of the policy, by tier
	disk   uint16       // number of the disk
	record uint32       // its number on the disk; none: it is not there
	links  [tiers]link  // of the policy, by tier
}

// recorded returns the fields that outlive a process, but sum between them.
func (e *entry) recorded() (before, behind []byte) {
	begin := (*byte)(unsafe.Pointer(e))
	const end = unsafe.Offsetof(e.space) + unsafe.Sizeof(e.space)
	all := unsafe.Slice(begin, end)
	return all[:unsafe.Offsetof(e.sum)], all[unsafe.Offsetof(e.crc):]
}

type link struct{ prev, next uint32 }

const (
	entryBytes = 64
	stampBytes = 4
)

var _ [entryBytes]byte = [unsafe.Sizeof(entry{})]byte{}

// asEntries has a part of the mapped file as a table.
func asEntries(p []byte) []entry {
	return unsafe.Slice((*entry)(unsafe.Pointer(unsafe.SliceData(p))), len(p)/entryBytes)
}

// asStamps has a part of the mapped file as the stamps.
func asStamps(p []byte) []uint32 {
	return unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(p))), len(p)/stampBytes)
}

// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"unsafe"
)

// entry is what the cache knows of one block. The entries are the table of the memory file, so that
// a process that attaches to the file after a kill finds them; it reads only the fields from key to
// space. An entry has 64 bytes, a line of the processor's cache, so that processors that change two
// entries do not contend.
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

	marks  [tiers]uint8 // what the policy notes about the block, by tier
	disk   uint16       // number of the disk
	record uint32       // its number on the disk; none: it is not there
	links  [tiers]link  // the block's neighbours in a list of the policy, by tier
}

// recorded returns the bytes of the fields that outlive a process: those before sum, which is left
// out, and those behind it.
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

// asEntries returns a part of the mapped file as a table of entries.
func asEntries(p []byte) []entry {
	return unsafe.Slice((*entry)(unsafe.Pointer(unsafe.SliceData(p))), len(p)/entryBytes)
}

// asStamps returns a part of the mapped file as the stamps of the entries.
func asStamps(p []byte) []uint32 {
	return unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(p))), len(p)/stampBytes)
}

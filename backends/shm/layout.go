// SPDX-License-Identifier: Apache-2.0

package shm

// Two kinds of pages are shared. The key table belongs to the owner of memory: it alone
// writes, every peer maps it read-only. The connection page belongs to one connection: both
// write, so neither believes what it reads there.
const (
	version    = 5
	tableMagic = 0x31656c6261547331 // "1sTable1"
	pageMagic  = 0x3165676150737331 // "1ssPage1"
	pageBytes  = 4096
	lineBytes  = 64 // a cache line: words of different writers lie that far apart
)

// The key table: a header page, a slot for each key, a generation for each arena.
const (
	tableMagicAt = 0
	tableKeysAt  = 8
	tableGateAt  = 16 // where the owner's gate is, see gate; 0: shut for good

	slotBytes   = 64
	slotEpochAt = 0
	slotTagAt   = 8  // 16 bytes; zero: no memory has this key
	slotArenaAt = 24 // low half the arena, high half flags
	slotOffAt   = 32
	slotSizeAt  = 40
	slotBaseAt  = 48
)

func tableBytes(keys uint32) uint64 {
	return (pageBytes + uint64(keys)*(slotBytes+8) + pageBytes - 1) &^ (pageBytes - 1)
}

// The connection page: a header, announcements, two rings of one size. The first carries
// notifications to the owner, the second its answers.
const (
	pageMagicAt = 0
	pageRingAt  = 8  // bytes of a ring
	pageLeftAt  = 16 // the initiator is out of the owner's memory for good

	// The words of the first ring; those of the second lie ringWords behind them.
	pageArmedAt   = 1 * lineBytes // the receiver sleeps: wake it
	pageWaitingAt = 2 * lineBytes // the sender found no room: wake it
	pageHeadAt    = 3 * lineBytes // what the receiver has read of the ring
	ringWords     = 3 * lineBytes

	announceAt  = pageBytes
	announceMax = 64 // copies at a time of one initiator, one line each

	ringAt       = announceAt + announceMax*lineBytes
	ringBytesMin = 4 * messageMax // 128 KiB: two of the longest messages fit however they lie
	ringBytesMax = 64 << 20
)

func connectionBytes(ring uint64) uint64 { return ringAt + 2*ring }

func ringSizeFits(n uint64) bool {
	return n >= ringBytesMin && n <= ringBytesMax && n&(n-1) == 0
}

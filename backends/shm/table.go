// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/session"
)

// Two kinds of pages are shared. The key table belongs to the owner of memory: it alone
// writes, every peer maps it read-only. The connection page belongs to one connection: both
// write, so both check all that they read there.
const (
	version    = 6
	tableMagic = 0x31656c6261547331 // "1sTable1"
	pageMagic  = 0x3165676150737331 // "1ssPage1"
	pageBytes  = 4096
	lineBytes  = 64 // a cache line: words of different writers lie that far apart
)

// The key table: a header page, a slot for each key, a generation for each arena.
const (
	tableMagicAt = 0
	tableKeysAt  = 8
	tableGateAt  = 16 // address of the owner's gate, see writeGate; 0: shut for good

	slotBytes   = 64
	slotEpochAt = 0
	slotTagAt   = 8  // 16 bytes; zero: no memory has this key
	slotArenaAt = 24 // the low half is the arena's index, the high half are flags
	slotOffAt   = 32 // this and the next two: see grant
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
	pageLeftAt  = 16 // not 0: no copy of the initiator reaches the owner's memory any more

	// The words of the first ring; those of the second lie ringWords behind them.
	pageArmedAt   = 1 * lineBytes // 1: the receiver may sleep, wake it for a message
	pageWaitingAt = 2 * lineBytes // 1: the sender found no room, wake it when there is some
	pageHeadAt    = 3 * lineBytes // bytes that the receiver has read since the start
	ringWords     = 3 * lineBytes

	announceAt  = pageBytes
	announceMax = 64 // most copies of one initiator at a time: each has a line

	ringAt       = announceAt + announceMax*lineBytes
	ringBytesMin = 4 * messageMax // 128 KiB: two of the longest messages fit however they lie
	ringBytesMax = 64 << 20
)

func connectionBytes(ring uint64) uint64 { return ringAt + 2*ring }

func ringSizeFits(n uint64) bool {
	return n >= ringBytesMin && n <= ringBytesMax && n&(n-1) == 0
}

// table is the key table, as its owner or a peer sees it.
type table struct {
	mem  []byte
	keys uint32
}

// grant is the memory that a key gives access to. It never changes within one epoch.
type grant struct {
	arena uint32
	flags uint32
	off   uint64 // in the arena
	size  uint64
	base  uint64 // address in the owner's process; foreign memory only
}

const (
	flagReadOnly = 1 << iota
	flagForeign
)

func newTable(keys uint32) (fd int, t table, err error) {
	fd, mem, err := hostmem.NewSealed("sluice-keys", tableBytes(keys), true)
	if err != nil {
		return -1, table{}, err
	}
	word(mem, tableMagicAt).Store(tableMagic)
	word(mem, tableKeysAt).Store(uint64(keys))
	return fd, table{mem, keys}, nil
}

// openTable maps a peer's table.
func openTable(fd int, keys uint32) (table, error) {
	if keys == 0 || keys > 1<<20 {
		return table{}, fmt.Errorf("peer's key table has %d keys: %w", keys, driver.ErrCorrupt)
	}
	mem, err := hostmem.MapSealed(fd, tableBytes(keys), unix.PROT_READ)
	if err != nil {
		return table{}, err
	}
	if word(mem, tableMagicAt).Load() != tableMagic ||
		word(mem, tableKeysAt).Load() != uint64(keys) {
		_ = unix.Munmap(mem)
		return table{}, fmt.Errorf("peer's key table: %w", driver.ErrCorrupt)
	}
	return table{mem, keys}, nil
}

func (t *table) slot(key uint32) []byte {
	at := pageBytes + uint64(key)*slotBytes
	return t.mem[at : at+slotBytes]
}

// gate is the word with the address of the owner's gate.
func (t *table) gate() *atomic.Uint64 { return word(t.mem, tableGateAt) }

func (t *table) epoch(key uint32) *atomic.Uint64 { return word(t.slot(key), slotEpochAt) }

// generation is the word that grows whenever pages of an arena move.
func (t *table) generation(arena uint32) *atomic.Uint64 {
	return word(t.mem, pageBytes+uint64(t.keys)*slotBytes+uint64(arena)*8)
}

// publish fills the slot of a free key. No peer has a token of the present epoch yet, so the order
// of the words does not matter.
func (t *table) publish(key uint32, tag [16]byte, g grant) {
	s := t.slot(key)
	word(s, slotArenaAt).Store(uint64(g.arena) | uint64(g.flags)<<32)
	word(s, slotOffAt).Store(g.off)
	word(s, slotSizeAt).Store(g.size)
	word(s, slotBaseAt).Store(g.base)
	setTag(s, tag)
}

// retract ends the epoch and empties the slot.
func (t *table) retract(key uint32) {
	t.epoch(key).Add(1) // pairs with the announcement in move, before it looks at the epoch
	setTag(t.slot(key), [16]byte{})
}

func setTag(slot []byte, tag [16]byte) {
	word(slot, slotTagAt).Store(binary.LittleEndian.Uint64(tag[:]))
	word(slot, slotTagAt+8).Store(binary.LittleEndian.Uint64(tag[8:]))
}

// read returns the words of a slot. ok is false when the epoch ended while they were read.
func (t *table) read(key uint32) (epoch uint64, tag [16]byte, g grant, ok bool) {
	s := t.slot(key)
	epoch = word(s, slotEpochAt).Load()
	arena := word(s, slotArenaAt).Load()
	g = grant{arena: uint32(arena), flags: uint32(arena >> 32), off: word(s, slotOffAt).Load(),
		size: word(s, slotSizeAt).Load(), base: word(s, slotBaseAt).Load()}
	binary.LittleEndian.PutUint64(tag[:], word(s, slotTagAt).Load())
	binary.LittleEndian.PutUint64(tag[8:], word(s, slotTagAt+8).Load())
	return epoch, tag, g, word(s, slotEpochAt).Load() == epoch
}

// tagOf returns the tag of a slot, a digest of secret, key and grant. With it a peer can check a
// token, but learns no secret, and a secret fits one grant only.
func tagOf(secret *[16]byte, key uint32, g *grant) (tag [16]byte) {
	var b [64]byte
	copy(b[:], secret[:])
	binary.LittleEndian.PutUint32(b[16:], key)
	binary.LittleEndian.PutUint32(b[20:], g.arena)
	binary.LittleEndian.PutUint32(b[24:], g.flags)
	binary.LittleEndian.PutUint64(b[32:], g.off)
	binary.LittleEndian.PutUint64(b[40:], g.size)
	binary.LittleEndian.PutUint64(b[48:], g.base)
	digest := sha256.Sum256(b[:])
	copy(tag[:], digest[:])
	return tag
}

// check checks a token and returns what it grants. The grant comes from the table and not from the
// token: a key has one grant in an epoch, and the tag is a digest of secret and grant.
func (t *table) check(tok *session.Token) (grant, error) {
	if tok.Key >= t.keys {
		return grant{}, fmt.Errorf("token of key %d: %w", tok.Key, driver.ErrBadToken)
	}
	epoch, tag, g, ok := t.read(tok.Key)
	if !ok || tok.Epoch < epoch {
		return grant{}, fmt.Errorf("token of epoch %d, the memory is at %d: %w",
			tok.Epoch, epoch, driver.ErrRevoked)
	}
	want := tagOf(&tok.Secret, tok.Key, &g)
	if tok.Epoch > epoch || tok.Size != g.size ||
		subtle.ConstantTimeCompare(tag[:], want[:]) != 1 {
		return grant{}, fmt.Errorf("token of key %d does not fit: %w", tok.Key, driver.ErrBadToken)
	}
	if g.flags&flagForeign == 0 && g.arena >= t.keys {
		return grant{}, fmt.Errorf("key %d lies in arena %d of %d: %w", tok.Key, g.arena, t.keys,
			driver.ErrCorrupt)
	}
	return g, nil
}

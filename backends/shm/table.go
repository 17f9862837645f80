// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// table is the key table, seen by its owner or by a peer.
type table struct {
	mem  []byte
	keys uint32
}

// grant is what a key opens. It never changes within one epoch.
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

// gate is where the owner's gate is.
func (t *table) gate() *atomic.Uint64 { return word(t.mem, tableGateAt) }

func (t *table) epoch(key uint32) *atomic.Uint64 { return word(t.slot(key), slotEpochAt) }

// generation moves on whenever the pages of an arena do.
func (t *table) generation(arena uint32) *atomic.Uint64 {
	return word(t.mem, pageBytes+uint64(t.keys)*slotBytes+uint64(arena)*8)
}

// publish fills the slot of a key that no memory has. No peer holds a token of
// the current epoch yet, so the order of the words does not matter.
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

// read returns a slot as it was during one epoch; ok is false when it moved.
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

// SPDX-License-Identifier: Apache-2.0

// Package sparse knows which entries of a KV cache lie in a pool of few slots. It moves no bytes.
package sparse

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// None is no entry, in a Batch, and the slot of it.
const None = ^uint32(0)

// Ways are the slots of a group. The number of a set's slots is a multiple of it.
const Ways = 16

// SlotsMax is the most that a Table has: a slot is named by 32 bits, and None is none.
const SlotsMax = 1<<31 - Ways

// Table knows, for each of its sets, one a sequence and layer, which entry lies in which slot. A
// set's slots are groups of Ways. An entry lies in its home group, or, if each slot there was used
// at the tick at which it came, in one behind, which the groups between count: beyond. Each Lookup
// is a tick of its sets. One that has not been used for longest goes first, among those of the
// group, and none that the Lookup asks for.
//
// Goroutines may use different sets at a time; a set is one goroutine's.
type Table struct {
	tags   []uint32 // by set, group and way: the entry; None: the slot is empty
	stamps []uint16 // by set, group and way: the set's clock when the entry was used last
	beyond []uint8  // by set and group: entries that lie behind it; 255: so many or more
	clocks []uint16 // by set
	groups uint32   // of a set
}

// Batch is what one Lookup asks. Lists that are written have their length before.
type Batch struct {
	Sets    []uint32 // each once
	Entries []uint32 // numbers of entries of their set, equally many for each; None: none
	// Blocks have 1<<Shift entries each, and are numbers of blocks in the memory that the entries
	// come from. Those of set i are Blocks[Starts[i]:Starts[i+1]].
	Blocks, Starts []uint32
	Shift          uint32

	Slots  []uint32 // written: of each entry, counted over all sets; None for None
	Counts []uint32 // written: misses of each set
}

// Misses are the entries that Lookup has found nowhere, in the order of the Batch. They have their
// slots already. The lists are used again by each Lookup.
type Misses struct {
	Slots []uint32 // into which the entries are to be brought
	From  []uint32 // where they lie, in entries; None: behind what 32 bits can count
	Place []uint32 // in Batch.Entries: the first that asked for it

	used []uint16 // by group of a set, for C: 0 before and behind
}

// New makes a table in which nothing is. slots, of one set, is rounded up to whole groups,
// at least two.
func New(sets, slots int) (*Table, error) {
	groups := max(uint64(slots+Ways-1)/Ways, 2)
	if sets <= 0 || slots <= 0 || uint64(sets) > SlotsMax || groups*Ways > SlotsMax/uint64(sets) {
		return nil, fmt.Errorf("%d sets of %d slots, a table has 1 to %d in all: %w", sets, slots,
			SlotsMax, driver.ErrBounds)
	}
	t := &Table{make([]uint32, uint64(sets)*groups*Ways), make([]uint16, uint64(sets)*groups*Ways),
		make([]uint8, uint64(sets)*groups), make([]uint16, sets), uint32(groups)}
	for i := range t.tags {
		t.tags[i] = None
	}
	return t, nil
}

// Slots returns the number of slots of one set.
func (t *Table) Slots() int { return int(t.groups) * Ways }

// Reset empties a set.
func (t *Table) Reset(set uint32) {
	groups := t.groups
	tags := t.tags[set*groups*Ways:][:groups*Ways]
	for i := range tags {
		tags[i] = None
	}
	clear(t.beyond[set*groups:][:groups])
	t.clocks[set] = 0
}

// Forget empties slots, as those of Misses whose bytes have not come. An empty one stays empty.
func (t *Table) Forget(slots []uint32) {
	for _, slot := range slots {
		entry := t.tags[slot]
		if entry == None {
			continue
		}
		t.tags[slot] = None
		set := slot / Ways / t.groups
		t.leave(t.beyond[set*t.groups:], entry, slot/Ways%t.groups)
	}
}

// Has reports whether an entry lies in a slot.
func (t *Table) Has(slot, entry uint32) bool { return t.tags[slot] == entry }

// Lookup finds the entries of a batch, and gives those that are nowhere the slots of others that
// have not been used for longest, and that it does not ask for. It does not allocate once the
// lists of m are long enough. A batch that is not as it must be, or an entry behind its set's
// blocks, is driver.ErrBounds, and nothing has changed.
func (t *Table) Lookup(b *Batch, m *Misses) error { return t.lookup(b, m, lookupBest) }

// lookup is Lookup in one of several ways: those of C, and walk.
func (t *Table) lookup(b *Batch, m *Misses, by func(*Table, *Batch, *Misses) int) error {
	m.Slots, m.From, m.Place = m.Slots[:0], m.From[:0], m.Place[:0]
	if err := t.check(b); err != nil {
		return err
	}
	n := len(b.Entries)
	for _, list := range []*[]uint32{&m.Slots, &m.From, &m.Place} {
		if cap(*list) < n {
			*list = make([]uint32, n)
		}
		*list = (*list)[:n]
	}
	if len(m.used) < int(t.groups) {
		m.used = make([]uint16, t.groups)
	}
	count := by(t, b, m)
	if count < 0 {
		bad := -1 - count
		m.Slots, m.From, m.Place = m.Slots[:0], m.From[:0], m.Place[:0]
		return fmt.Errorf("entry %d of set %d lies behind its blocks: %w", b.Entries[bad],
			b.Sets[bad/(n/len(b.Sets))], driver.ErrBounds)
	}
	m.Slots, m.From, m.Place = m.Slots[:count], m.From[:count], m.Place[:count]
	return nil
}

func (t *Table) check(b *Batch) error {
	sets := len(b.Sets)
	if sets == 0 || len(b.Entries)%sets != 0 || len(b.Slots) != len(b.Entries) ||
		len(b.Counts) != sets || len(b.Starts) != sets+1 || b.Shift > 31 {
		return fmt.Errorf("look up: %d sets, %d entries, %d slots, %d counts, %d starts, shift "+
			"%d: lists of other lengths, see Batch: %w", sets, len(b.Entries), len(b.Slots),
			len(b.Counts), len(b.Starts), b.Shift, driver.ErrBounds)
	}
	if n := len(b.Entries) / sets; n > t.Slots() {
		return fmt.Errorf("look up %d entries of a set that has %d slots: %w", n, t.Slots(),
			driver.ErrBounds)
	}
	for i, set := range b.Sets {
		if uint64(set) >= uint64(len(t.clocks)) || i > 0 && b.Sets[i-1] >= set {
			return fmt.Errorf("look up set %d: the table has %d, and a batch names them in "+
				"ascending order: %w", set, len(t.clocks), driver.ErrBounds)
		}
		if b.Starts[i] > b.Starts[i+1] || uint64(b.Starts[i+1]) > uint64(len(b.Blocks)) {
			return fmt.Errorf("look up set %d: its blocks are %d to %d of %d: %w", set, b.Starts[i],
				b.Starts[i+1], len(b.Blocks), driver.ErrBounds)
		}
	}
	return nil
}

// walk is Lookup in Go.
func walk(t *Table, b *Batch, m *Misses) (count int) {
	n := len(b.Entries) / len(b.Sets)
	for i, entry := range b.Entries {
		at := i / n
		if end := uint64(b.Starts[at+1]-b.Starts[at]) << b.Shift; entry != None &&
			uint64(entry) >= end {
			return -1 - i
		}
	}
	for at, set := range b.Sets {
		before := count
		tags, stamps := t.tags[set*t.groups*Ways:], t.stamps[set*t.groups*Ways:]
		beyond, blocks := t.beyond[set*t.groups:], b.Blocks[b.Starts[at]:]
		if t.clocks[set]++; t.clocks[set] == 0 {
			clear(stamps[:t.groups*Ways])
			t.clocks[set] = 1
		}
		clock, missed := t.clocks[set], m.Place[count:count]
		for i := at * n; i < (at+1)*n; i++ { // what is there does not go for what is not
			entry := b.Entries[i]
			if entry == None {
				b.Slots[i] = None
				continue
			}
			slot := t.find(tags, beyond, entry)
			if slot == None {
				missed = append(missed, uint32(i))
				continue
			}
			stamps[slot] = clock
			b.Slots[i] = set*t.groups*Ways + slot
		}
		for _, i := range missed {
			entry := b.Entries[i]
			slot := t.find(tags, beyond, entry)
			if slot == None { // else the batch has asked for it twice
				slot = t.place(tags, stamps, beyond, entry, clock)
				m.Slots[count] = set*t.groups*Ways + slot
				m.From[count] = None
				if block := blocks[entry>>b.Shift]; block <= None>>b.Shift {
					m.From[count] = block<<b.Shift | entry&(1<<b.Shift-1)
				}
				m.Place[count] = i
				count++
			}
			b.Slots[i] = set*t.groups*Ways + slot
		}
		b.Counts[at] = uint32(count - before)
	}
	return count
}

// home returns the group in which an entry is looked for first. Neighbours are spread evenly.
func (t *Table) home(entry uint32) uint32 {
	return uint32(uint64(entry*0x9e3779b1) * uint64(t.groups) >> 32)
}

func (t *Table) next(g uint32) uint32 {
	if g+1 == t.groups {
		return 0
	}
	return g + 1
}

func (t *Table) find(tags []uint32, beyond []uint8, entry uint32) (slot uint32) {
	g := t.home(entry)
	for range t.groups {
		for way := range uint32(Ways) {
			if tags[g*Ways+way] == entry {
				return g*Ways + way
			}
		}
		if beyond[g] == 0 {
			break
		}
		g = t.next(g)
	}
	return None
}

// place gives an entry that is nowhere a slot: an empty one, or the oldest of the first group that
// has one which was not used at this tick.
func (t *Table) place(tags []uint32, stamps []uint16, beyond []uint8, entry uint32,
	clock uint16) (slot uint32) {
	first := t.home(entry)
	g := first
	for {
		way, age := uint32(Ways), uint16(0)
		for w := range uint32(Ways) {
			if tags[g*Ways+w] == None {
				way = w
				break
			}
			if a := clock - stamps[g*Ways+w]; a > age {
				way, age = w, a
			}
		}
		if way < Ways {
			slot = g*Ways + way
			break
		}
		g = t.next(g) // there is one: a Lookup has no more entries than the set slots
	}
	if tags[slot] != None {
		t.leave(beyond, tags[slot], g)
	}
	tags[slot], stamps[slot] = entry, clock
	for ; first != g; first = t.next(first) {
		if beyond[first] != 255 {
			beyond[first]++
		}
	}
	return slot
}

// leave takes an entry of a group from those that the groups before it count.
func (t *Table) leave(beyond []uint8, entry, group uint32) {
	for h := t.home(entry); h != group; h = t.next(h) {
		if beyond[h] != 255 {
			beyond[h]--
		}
	}
}

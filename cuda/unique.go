// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"math/bits"
	"math/rand/v2"

	"github.com/sluicehq/sluice/driver"
)

// uniqueMax bounds the table of a Unique: 16 bytes for each of twice as many indices.
const uniqueMax = 1 << 24 // indices; 512 MiB

// Unique finds the different indices of a list, so that the entries that several tokens of a
// step ask for cross the bus once. It keeps a table of 16 bytes for each of twice as many indices as the longest list
// may have, takes time in proportion to the list, and allocates nothing but by NewUnique. A Unique is not for several
// goroutines at once.
type Unique struct {
	slots []uniqueSlot // a power of two, at most half of them in use
	shift int          // what leaves the bits that number a slot
	seed  uint64       // odd; unguessable, so that no list makes all indices meet
	stamp uint32       // of this list: slots of earlier ones are empty
	max   int
}

type uniqueSlot struct {
	index uint64
	stamp uint32
	place uint32
}

// NewUnique makes one for lists of up to max indices, at most 1<<24.
func NewUnique(max int) (*Unique, error) {
	if max < 1 || max > uniqueMax {
		return nil, fmt.Errorf("lists of %d indices, want 1 to %d: %w", max, uniqueMax, driver.ErrBounds)
	}
	power := bits.Len(uint(2*max - 1))
	return &Unique{slots: make([]uniqueSlot, 1<<power), shift: 64 - power, seed: rand.Uint64() | 1, max: max}, nil
}

// U32 writes the different indices of a list to the front of unique, in the order in which they first
// appear, and for each of the list to at where among them it is. Skip32 is none: it stays Skip32 in at. It returns
// how many there are. Lists that are longer than max, or than unique or at, are
// driver.ErrBounds.
//
// A gather of the different ones to a scratch memory, and a Move on the card from there by
// Src: Index{U32: at}, is the gather of the list.
func (u *Unique) U32(list, unique, at []uint32) (n int, err error) {
	if err := u.begin(len(list), len(unique), len(at)); err != nil {
		return 0, err
	}
	return find(u, list, unique, at, Skip32), nil
}

// U64 is U32 for wide indices.
func (u *Unique) U64(list, unique []uint64, at []uint32) (n int, err error) {
	if err := u.begin(len(list), len(unique), len(at)); err != nil {
		return 0, err
	}
	return find(u, list, unique, at, Skip64), nil
}

func (u *Unique) begin(list, unique, at int) error {
	if list > u.max || unique < list || at < list {
		return driver.ErrBounds
	}
	if u.stamp++; u.stamp == 0 { // once in four billion lists
		clear(u.slots)
		u.stamp = 1
	}
	return nil
}

func find[T uint32 | uint64](u *Unique, list, unique []T, at []uint32, skip T) (n int) {
	unique, at = unique[:len(list)], at[:len(list)]
	for i, index := range list {
		if index == skip {
			at[i] = Skip32
			continue
		}
		s := u.slot(uint64(index))
		if s.stamp != u.stamp {
			*s = uniqueSlot{uint64(index), u.stamp, uint32(n)}
			unique[n] = index
			n++
		}
		at[i] = s.place
	}
	return n
}

// slot is where an index is, or an empty one for it.
func (u *Unique) slot(index uint64) *uniqueSlot {
	mask := uint64(len(u.slots) - 1)
	for h := mix(index^u.seed) >> u.shift; ; h++ {
		if s := &u.slots[h&mask]; s.stamp != u.stamp || s.index == index {
			return s
		}
	}
}

// mix is the finaliser of SplitMix64.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

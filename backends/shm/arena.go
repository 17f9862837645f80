// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"errors"
	"fmt"
	"reflect"

	"github.com/sluicehq/sluice/driver"
)

// arena is one Shared, however many ranges of it are registered. Its generation, in the
// table, moves on before pages of it do, also where another user of the Shared renews
// them: a peer that looks at it after its copy does that copy again, so that no write which
// still hit the old pages counts as done.
type arena struct {
	index  uint32
	shared driver.Shared
	size   uint64
	refs   int    // Backend.mu
	stop   func() // no renewal moves the generation on any more
}

// arenaOf returns the arena of a Shared with one more reference; nil: its owner lends nothing.
// Preconditions: Backend.mu is held.
func (b *Backend) arenaOf(s driver.Shared) (*arena, error) {
	if !reflect.TypeOf(s).Comparable() {
		return nil, fmt.Errorf("shared memory of type %T cannot be told apart: use a pointer: %w",
			s, driver.ErrNotSupported)
	}
	if a := b.arenas[s]; a != nil {
		a.refs++
		return a, nil
	}
	size, err := sharedSize(s)
	if errors.Is(err, driver.ErrNotSupported) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	n := len(b.freeArenas)
	a := &arena{index: b.freeArenas[n-1], shared: s, size: size, refs: 1}
	generation := b.table.generation(a.index)
	a.stop = s.OnRenew(func() func() bool {
		generation.Add(1) // pairs with the announcement in move, before it takes the generation
		return b.oldWriters()
	})
	b.freeArenas = b.freeArenas[:n-1]
	b.arenas[s] = a
	return a, nil
}

func sharedSize(s driver.Shared) (size uint64, err error) {
	err = s.Lend(func(extents []driver.Extent) error {
		for _, e := range extents {
			if e.Off != size || e.FDOff%pageBytes != 0 || e.Off%pageBytes != 0 {
				return fmt.Errorf("extent at %d has a gap before it or is not page-aligned: %w",
					e.Off, driver.ErrBounds)
			}
			size += e.Len
		}
		return nil
	})
	return size, err
}

// releaseArena gives one reference back. The generation moves on, so that what a
// peer still has mapped is never taken for the next arena of this index.
// Preconditions: Backend.mu is held.
func (b *Backend) releaseArena(a *arena) {
	a.refs--
	if a.refs > 0 {
		return
	}
	a.stop()
	b.table.generation(a.index).Add(1)
	delete(b.arenas, a.shared)
	b.freeArenas = append(b.freeArenas, a.index)
}

// enter keeps the pages where they are during a copy of our own into this memory; leave
// ends that.
func (m *memory) enter() {
	if m.arena != nil {
		m.arena.shared.Enter()
	}
}

func (m *memory) leave() {
	if m.arena != nil {
		m.arena.shared.Leave()
	}
}

// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// arena is one Shared, however many ranges of it are registered. Backend.mu
// guards its place in the map; mu keeps its pages where they are.
type arena struct {
	index  uint32
	shared driver.Shared
	size   uint64
	refs   int // Backend.mu

	mu         sync.Mutex // pages do not move while it is held; after Backend.mu
	generation atomic.Uint64
}

// arenaOf returns the arena of a Shared with one more reference.
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
	if err != nil {
		return nil, err
	}
	n := len(b.freeArenas)
	a := &arena{index: b.freeArenas[n-1], shared: s, size: size, refs: 1}
	a.generation.Store(s.Generation())
	b.freeArenas = b.freeArenas[:n-1]
	b.arenas[s] = a
	return a, nil
}

func sharedSize(s driver.Shared) (uint64, error) {
	var size uint64
	for _, e := range s.Extents(nil) {
		if e.Off != size || e.FDOff%pageBytes != 0 || e.Off%pageBytes != 0 {
			return 0, fmt.Errorf("extent at %d has a gap before it or is not page-aligned: %w",
				e.Off, driver.ErrBounds)
		}
		size += e.Len
	}
	return size, nil
}

// releaseArena gives one reference back. The generation moves on, so that what a
// peer still has mapped is never taken for the next arena of this index.
// Preconditions: Backend.mu is held.
func (b *Backend) releaseArena(a *arena) {
	a.refs--
	if a.refs > 0 {
		return
	}
	b.table.generation(a.index).Add(1)
	delete(b.arenas, a.shared)
	b.freeArenas = append(b.freeArenas, a.index)
}

// noticeRenewal moves our generation on when pages were renewed elsewhere.
func (a *arena) noticeRenewal(t *table) {
	now := a.shared.Generation()
	if a.generation.Load() != now && a.generation.Swap(now) != now {
		t.generation(a.index).Add(1)
	}
}

// renew puts fresh pages under a range. The generation moves first: a peer that
// looks at it after its copy does that copy again, so that no write which still
// hit the old pages counts as done.
func (a *arena) renew(t *table, off, n uint64) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	t.generation(a.index).Add(1)
	err := a.shared.Renew(off, n)
	a.generation.Store(a.shared.Generation())
	return err
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

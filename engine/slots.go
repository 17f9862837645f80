// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"sync"
	"sync/atomic"
)

// slots gives each live transfer a small number, so that a completion finds it
// by its tag without a lock or a map. A slot's generation only grows, whatever
// transfer has it: a tag of the past matches none.
type slots struct {
	live       []atomic.Pointer[Transfer]
	generation []uint64 // the last one given out; touched by the holder alone

	mu   sync.Mutex // guards what follows
	used int        // slots that were ever taken
	free []int
}

func (s *slots) init(n int) {
	s.live = make([]atomic.Pointer[Transfer], n)
	s.generation = make([]uint64, n)
}

func (s *slots) take(t *Transfer) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch n := len(s.free); {
	case n > 0:
		t.slot, s.free = s.free[n-1], s.free[:n-1]
	case s.used == len(s.live):
		return false
	default:
		t.slot = s.used
		s.used++
	}
	s.live[t.slot].Store(t)
	return true
}

func (s *slots) give(t *Transfer) {
	s.live[t.slot].Store(nil)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free = append(s.free, t.slot)
}

// renew returns the generation of a new post of t.
func (s *slots) renew(t *Transfer) (generation uint64) {
	s.generation[t.slot]++
	return s.generation[t.slot]
}

// posted counts the transfers that are under way.
func (s *slots) posted() (n int) {
	s.mu.Lock()
	used := s.used
	s.mu.Unlock()
	for i := range used {
		if t := s.live[i].Load(); t != nil && t.look().underWay() {
			n++
		}
	}
	return n
}

func (s *slots) get(slot int) *Transfer {
	if slot >= len(s.live) {
		return nil
	}
	return s.live[slot].Load()
}

// SPDX-License-Identifier: Apache-2.0

package session

import (
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/driver"
)

// KeyTable holds memories by key. The epoch of a memory is the generation of its key: a key that
// comes free is used again in the next epoch, so a token of the memory before is an old one, not a
// wrong one. All methods may be called by any goroutine.
type KeyTable[M any] struct {
	Most int // keys at a time, at most KeyLimit; set before use

	mu       sync.RWMutex
	memories []*M     // nil: free, or on its way
	epochs   []uint64 // of each key: that of its present memory, or of the next
	free     []uint32
}

// Take reserves a key for a memory that no lookup finds yet: one that came free, the
// last first, or else the next. The error wraps driver.ErrFull.
func (t *KeyTable[M]) Take() (key uint32, epoch uint64, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n := len(t.free); n > 0 {
		key = t.free[n-1]
		t.free = t.free[:n-1]
		return key, t.epochs[key], nil
	}
	n := len(t.memories)
	if n >= t.Most {
		return 0, 0, fmt.Errorf("all %d keys are taken, raise Config.KeysMax: %w", n,
			driver.ErrFull)
	}
	t.memories, t.epochs = append(t.memories, nil), append(t.epochs, 1)
	return uint32(n), 1, nil
}

// Put shows a memory under a key that was taken.
func (t *KeyTable[M]) Put(key uint32, m *M) {
	t.mu.Lock()
	t.memories[key] = m
	t.mu.Unlock()
}

// Free forgets the memory of a key, if it has one, and gives the key to the next Take, with the
// epoch behind the present one.
func (t *KeyTable[M]) Free(key uint32) {
	t.mu.Lock()
	t.memories[key] = nil
	t.epochs[key]++
	t.free = append(t.free, key)
	t.mu.Unlock()
}

// At returns what a key names, nil for nothing.
func (t *KeyTable[M]) At(key uint32) *M {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if uint64(key) >= uint64(len(t.memories)) {
		return nil
	}
	return t.memories[key]
}

// All lists the memories.
func (t *KeyTable[M]) All() (list []*M) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for _, m := range t.memories {
		if m != nil {
			list = append(list, m)
		}
	}
	return list
}

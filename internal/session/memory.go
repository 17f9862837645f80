// SPDX-License-Identifier: Apache-2.0

package session

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"hash/crc32"
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

// Take reserves a key for a memory; At does not find it before Put. It prefers the key that was
// freed last. The error wraps driver.ErrFull.
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

// Put makes At find a memory under a key of Take.
func (t *KeyTable[M]) Put(key uint32, m *M) {
	t.mu.Lock()
	t.memories[key] = m
	t.mu.Unlock()
}

// Free removes the memory of a key, if it has one, and frees the key, with the next epoch.
func (t *KeyTable[M]) Free(key uint32) {
	t.mu.Lock()
	t.memories[key] = nil
	t.epochs[key]++
	t.free = append(t.free, key)
	t.mu.Unlock()
}

// At returns what a key names, or nil.
func (t *KeyTable[M]) At(key uint32) *M {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if uint64(key) >= uint64(len(t.memories)) {
		return nil
	}
	return t.memories[key]
}

// All returns the memories.
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

// Imports is the table of memories that a peer has imported, by key. It uses the key again that was
// freed last. The zero value is empty. The caller holds a lock.
type Imports[R any] struct {
	list []*R // nil: free
	free []uint32
}

// Add returns a key for r. The error wraps driver.ErrFull.
func (i *Imports[R]) Add(r *R) (key uint32, err error) {
	if n := len(i.free); n > 0 {
		key, i.free = i.free[n-1], i.free[:n-1]
		i.list[key] = r
		return key, nil
	}
	if len(i.list) >= KeyLimit {
		return 0, fmt.Errorf("all %d keys are taken: %w", KeyLimit, driver.ErrFull)
	}
	i.list = append(i.list, r)
	return uint32(len(i.list) - 1), nil
}

// At returns what a key names, or nil.
func (i *Imports[R]) At(key uint32) *R {
	if uint64(key) >= uint64(len(i.list)) {
		return nil
	}
	return i.list[key]
}

// Drop frees a key and returns what it named, or nil.
func (i *Imports[R]) Drop(key uint32) *R {
	r := i.At(key)
	if r != nil {
		i.list[key] = nil
		i.free = append(i.free, key)
	}
	return r
}

// Replace makes a key name another import if it still names r, and reports whether it did.
func (i *Imports[R]) Replace(key uint32, r, other *R) bool {
	if i.At(key) != r {
		return false
	}
	i.list[key] = other
	return true
}

// Owner identifies a backend by a random number.
type Owner [8]byte

// NewOwner returns a new random Owner.
func NewOwner() (id Owner) {
	_, _ = rand.Read(id[:]) // never fails: it ends the program instead
	return id
}

// Token is what a peer must present to import a memory: secret, key, epoch and size, and a check
// that tells a damaged or foreign token from an old one. A token does not say how to reach the
// bytes: the owner tells that to a peer that presents the secret. So only that peer learns it, and
// a token is short.
type Token struct {
	Secret [16]byte
	Key    uint32
	Epoch  uint64
	Size   uint64
}

// KeyLimit bounds the keys of a backend: all are below it.
const KeyLimit = 1 << 20

// checkBytes is the length of the check. Two bytes suffice for a good error message; security
// depends on the secret, which the owner compares. So 2,048 tokens fit in 64 KiB.
const tokenCheckBytes = 2

// Append appends the token of an owner's memory.
func (t *Token) Append(dst []byte, owner *Owner) []byte {
	start := len(dst)
	dst = append(dst, t.Secret[:]...)
	dst = binary.AppendUvarint(dst, uint64(t.Key))
	dst = binary.AppendUvarint(dst, t.Epoch)
	dst = binary.AppendUvarint(dst, t.Size)
	return binary.LittleEndian.AppendUint16(dst, tokenCheck(dst[start:], owner))
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// check is a CRC-32C, folded to two bytes, of the token and the owner. It protects against damage
// only: any peer that has a token can compute it.
func tokenCheck(body []byte, owner *Owner) uint16 {
	sum := crc32.Update(crc32.Checksum(owner[:], castagnoli), castagnoli, body)
	return uint16(sum>>16 ^ sum)
}

// DecodeToken decodes a token that a peer presents to an owner. The error wraps driver.ErrBadToken.
func DecodeToken(b []byte, owner *Owner) (t Token, err error) {
	if len(b) < 16+3+tokenCheckBytes || len(b) > 16+5+10+10+tokenCheckBytes {
		return t, fmt.Errorf("token of %d bytes: %w", len(b), driver.ErrBadToken)
	}
	body, sum := b[:len(b)-tokenCheckBytes], binary.LittleEndian.Uint16(b[len(b)-tokenCheckBytes:])
	if tokenCheck(body, owner) != sum {
		return t, fmt.Errorf("token is damaged or another backend's: %w", driver.ErrBadToken)
	}
	copy(t.Secret[:], body)
	var numbers [3]uint64
	rest := body[16:]
	for i := range numbers {
		value, n := binary.Uvarint(rest)
		if n <= 0 {
			return t, fmt.Errorf("token is cut: %w", driver.ErrBadToken)
		}
		numbers[i], rest = value, rest[n:]
	}
	if len(rest) > 0 || numbers[0] >= KeyLimit || numbers[2] == 0 {
		return t, fmt.Errorf("token of key %d, %d bytes: %w", numbers[0], numbers[2],
			driver.ErrBadToken)
	}
	t.Key, t.Epoch, t.Size = uint32(numbers[0]), numbers[1], numbers[2]
	return t, nil
}

// ContextLock is a lock whose Lock waits no longer than a context. A memory has one, so that one
// goroutine at a time looks for the proof that it is revoked.
type ContextLock chan struct{}

// NewContextLock returns an unlocked one.
func NewContextLock() ContextLock { return make(ContextLock, 1) }

// Lock waits for the lock until ctx is over, and then returns the error of ctx. If the lock is free
// it is taken even with a context that is over.
func (l ContextLock) Lock(ctx context.Context) error {
	select {
	case l <- struct{}{}:
		return nil
	default:
	}
	select {
	case l <- struct{}{}:
		return nil
	case <-ctx.Done():
		return driver.ContextError(ctx)
	}
}

// Unlock unlocks it.
func (l ContextLock) Unlock() { <-l }

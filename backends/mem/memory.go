// SPDX-License-Identifier: Apache-2.0

package mem

import (
	"context"
	"crypto/subtle"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

type memory struct {
	b     *Backend
	key   uint32
	epoch uint64 // the generation of the key
	seg   driver.Segment

	gate       sync.RWMutex        // read-locked by each copy of a peer to or from this memory
	revoked    atomic.Bool         // checked by each copy while it holds gate
	revokeLock session.ContextLock // one Revoke at a time
	gone       bool                // guarded by revokeLock: the key may be another memory's
}

// Register implements driver.Backend.
func (b *Backend) Register(seg driver.Segment) (driver.Memory, error) {
	if seg.Kind != driver.DRAM {
		return nil, fmt.Errorf("register %v with mem: %w", seg.Kind, driver.ErrNotSupported)
	}
	if err := seg.Check(); err != nil {
		return nil, err
	}
	b.mu.Lock() // so that Close, which sets closed under it, finds this memory in its list
	defer b.mu.Unlock()
	if b.closed.Load() {
		return nil, driver.ErrClosed
	}
	key, epoch, err := b.memories.Take()
	if err != nil {
		return nil, fmt.Errorf("register with mem: %w", err)
	}
	m := &memory{b: b, key: key, epoch: epoch, seg: seg, revokeLock: session.NewContextLock()}
	b.memories.Put(key, m)
	return m, nil
}

// Key implements driver.Memory.
func (m *memory) Key() uint32 { return m.key }

// AppendToken implements driver.Memory.
func (m *memory) AppendToken(dst []byte) ([]byte, error) {
	if m.revoked.Load() {
		return dst, driver.ErrClosed
	}
	t := session.Token{Secret: m.seg.Secret, Key: m.key, Epoch: m.epoch, Size: m.seg.Len}
	return t.Append(dst, &m.b.owner), nil
}

// checkToken checks a token that names the memory's key. m is nil if the key is free.
func (m *memory) checkToken(t *session.Token) error {
	switch {
	case m == nil || t.Epoch < m.epoch || m.revoked.Load():
		return driver.ErrRevoked
	case t.Epoch > m.epoch || t.Size != m.seg.Len ||
		subtle.ConstantTimeCompare(m.seg.Secret[:], t.Secret[:]) == 0:
		return driver.ErrBadToken
	}
	return nil
}

// Revoke implements driver.Memory. It waits for the copies that hold the gate, each of at most
// pieceMax bytes; later ones find revoked set. Only a copy that waits for a page fault holds the
// gate for long. Revoke tries the gate again and again instead of waiting in it, so that ctx can
// end the wait.
func (m *memory) Revoke(ctx context.Context) error {
	m.revoked.Store(true)
	if err := m.revokeLock.Lock(ctx); err != nil {
		return fmt.Errorf("revoke memory: %w", err)
	}
	defer m.revokeLock.Unlock()
	if m.gone {
		return nil
	}
	for !m.gate.TryLock() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("revoke memory: a copy is in hand: %w", driver.ContextError(ctx))
		case <-time.After(gatePause):
		}
	}
	m.gate.Unlock()
	m.gone = true
	m.b.memories.Free(m.key)
	return nil
}

// gatePause is how long Revoke waits between two attempts to lock the gate.
const gatePause = 20 * time.Microsecond

// SPDX-License-Identifier: Apache-2.0

package mem

import (
	"context"
	"crypto/subtle"
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

type memory struct {
	b     *Backend
	key   uint32
	epoch uint64 // the generation of the key
	seg   driver.Segment

	gate    sync.RWMutex // held for reading by each copy through a token
	revoked bool         // guarded by gate
}

// Register implements driver.Backend.
func (b *Backend) Register(seg driver.Segment) (driver.Memory, error) {
	if seg.Kind != driver.DRAM {
		return nil, fmt.Errorf("register %v with mem: %w", seg.Kind, driver.ErrNotSupported)
	}
	if err := seg.Check(); err != nil {
		return nil, err
	}
	b.mu.Lock() // Close lists the memories behind it
	defer b.mu.Unlock()
	if b.closed.Load() {
		return nil, driver.ErrClosed
	}
	key, epoch, err := b.memories.Take()
	if err != nil {
		return nil, fmt.Errorf("register with mem: %w", err)
	}
	m := &memory{b: b, key: key, epoch: epoch, seg: seg}
	b.memories.Put(key, m)
	return m, nil
}

// Key implements driver.Memory.
func (m *memory) Key() uint32 { return m.key }

// AppendToken implements driver.Memory.
func (m *memory) AppendToken(dst []byte) ([]byte, error) {
	if m.isRevoked() {
		return dst, driver.ErrClosed
	}
	t := session.Token{Secret: m.seg.Secret, Key: m.key, Epoch: m.epoch, Size: m.seg.Len}
	return t.Append(dst, &m.b.owner), nil
}

// opens says what a token of the memory's key is good for.
func (m *memory) opens(t *session.Token) error {
	switch {
	case m == nil || t.Epoch < m.epoch || m.isRevoked():
		return driver.ErrRevoked
	case t.Epoch > m.epoch || t.Size != m.seg.Len ||
		subtle.ConstantTimeCompare(m.seg.Secret[:], t.Secret[:]) == 0:
		return driver.ErrBadToken
	}
	return nil
}

func (m *memory) isRevoked() bool {
	m.gate.RLock()
	defer m.gate.RUnlock()
	return m.revoked
}

// Revoke implements driver.Memory. The gate is free within one piece, since a peer in this
// process cannot be frozen apart from us: so the proof is there whatever ctx says.
func (m *memory) Revoke(context.Context) error {
	m.gate.Lock() // no copy is in hand, and each that follows looks at revoked
	was := m.revoked
	m.revoked = true
	m.gate.Unlock()
	if !was {
		m.b.memories.Free(m.key)
	}
	return nil
}

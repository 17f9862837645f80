// SPDX-License-Identifier: Apache-2.0

package mem

import (
	"context"
	"crypto/subtle"
	"encoding/binary"
	"fmt"
	"math"
	"sync"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

type memory struct {
	b     *Backend
	key   uint32
	seg   driver.Segment
	gate  sync.RWMutex // held for reading by each copy through a token
	epoch uint64       // guarded by gate; odd while registered
}

// Register implements driver.Backend.
func (b *Backend) Register(seg driver.Segment) (driver.Memory, error) {
	if seg.Kind != driver.DRAM {
		return nil, fmt.Errorf("register %v with mem: %w", seg.Kind, driver.ErrNotSupported)
	}
	if err := seg.Check(); err != nil {
		return nil, err
	}
	m := &memory{b: b, seg: seg, epoch: 1}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed.Load() {
		return nil, driver.ErrClosed
	}
	if n := len(b.freeKeys); n > 0 {
		m.key, b.freeKeys = b.freeKeys[n-1], b.freeKeys[:n-1]
		b.memories[m.key] = m
		return m, nil
	}
	m.key = uint32(len(b.memories))
	b.memories = append(b.memories, m)
	return m, nil
}

func (m *memory) Key() uint32 { return m.key }

// AppendToken implements driver.Memory: secret, key, epoch, size.
func (m *memory) AppendToken(dst []byte) ([]byte, error) {
	m.gate.RLock()
	defer m.gate.RUnlock()
	if m.epoch == closedEpoch {
		return dst, driver.ErrClosed
	}
	dst = append(dst, m.seg.Secret[:]...)
	dst = binary.AppendUvarint(dst, uint64(m.key))
	dst = binary.AppendUvarint(dst, m.epoch)
	return binary.AppendUvarint(dst, m.seg.Len), nil
}

const closedEpoch = math.MaxUint64

// opens compares what a token says with the memory.
func (m *memory) opens(epoch uint64, secret []byte) error {
	m.gate.RLock()
	defer m.gate.RUnlock()
	switch {
	case epoch < m.epoch:
		return driver.ErrRevoked
	case epoch > m.epoch, subtle.ConstantTimeCompare(m.seg.Secret[:], secret) == 0:
		return driver.ErrBadToken
	}
	return nil
}

// Close implements driver.Memory.
func (m *memory) Close() error {
	m.gate.Lock()
	gone := m.epoch == closedEpoch
	m.epoch = closedEpoch
	m.gate.Unlock()
	if gone {
		return nil
	}
	m.b.mu.Lock()
	defer m.b.mu.Unlock()
	m.b.memories[m.key] = nil
	m.b.freeKeys = append(m.b.freeKeys, m.key)
	return nil
}

// Fence implements driver.Backend. The gate is free within one piece, since a peer in this
// process cannot be frozen apart from us: so the proof is there whatever ctx says.
func (b *Backend) Fence(_ context.Context, key uint32) error {
	m := b.memory(key)
	if m == nil {
		return fmt.Errorf("fence key %d: no such memory: %w", key, driver.ErrBounds)
	}
	m.gate.Lock()
	defer m.gate.Unlock()
	if m.epoch != closedEpoch {
		m.epoch++
		m.seg.Secret = session.NewSecret()
	}
	return nil
}

func (b *Backend) memory(key uint32) *memory {
	b.mu.RLock()
	defer b.mu.RUnlock()
	if uint64(key) >= uint64(len(b.memories)) {
		return nil
	}
	return b.memories[key]
}

// had reports whether any memory had the key, ever.
func (b *Backend) had(key uint32) bool {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return uint64(key) < uint64(len(b.memories))
}

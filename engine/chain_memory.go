// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"crypto/subtle"
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/wire"
)

// stagedMemory is a registration as the stager knows it: the memories of the other lanes,
// through which this engine itself reaches the bytes.
type stagedMemory struct {
	s      *stager
	key    uint32
	region *Region // in no table: segment and memories alone

	revoked atomic.Bool // set under mu

	mu     sync.Mutex // guards what follows
	self   *Remote    // the same as memory of the engine's own peer
	active int        // hops for peers
	quiet  chan struct{}
}

// register makes a segment known that the other lanes know by mems.
func (s *stager) register(seg driver.Segment, mems []driver.Memory) driver.Memory {
	m := &stagedMemory{s: s, region: &Region{e: s.e, name: "(staged)", seg: seg, mems: mems,
		private: true}}
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.lastKey++; s.memories[s.lastKey] != nil || s.lastKey == 0; s.lastKey++ {
	}
	m.key = s.lastKey
	s.memories[m.key] = m
	return m
}

func (s *stager) memory(key uint32) *stagedMemory {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.memories[key]
}

// Key implements driver.Memory.
func (m *stagedMemory) Key() uint32 { return m.key }

// AppendToken implements driver.Memory. DRAM has none: a backend that connects us reaches it.
func (m *stagedMemory) AppendToken(dst []byte) ([]byte, error) {
	switch {
	case m.revoked.Load(): // without the lock: own holds it, and asks for all tokens
		return dst, ErrClosed
	case m.region.seg.Kind == driver.DRAM:
		return dst, nil
	}
	dst = append(dst, m.region.seg.Secret[:]...)
	return binary.LittleEndian.AppendUint32(dst, m.key), nil
}

// enter admits a hop that shows this token, until leave.
func (s *stager) enter(token []byte) (*stagedMemory, error) {
	if len(token) != wire.HopToken {
		return nil, driver.ErrBadToken
	}
	m := s.memory(binary.LittleEndian.Uint32(token[16:]))
	if m == nil {
		return nil, ErrRevoked
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.revoked.Load() || subtle.ConstantTimeCompare(token[:16], m.region.seg.Secret[:]) != 1 {
		return nil, ErrRevoked // the key has gone to another memory, or was never given out
	}
	m.active++
	return m, nil
}

func (m *stagedMemory) leave() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.active--; m.active == 0 && m.quiet != nil {
		close(m.quiet)
		m.quiet = nil
	}
}

// Revoke implements driver.Memory: no hop for a peer begins [end], and those under way end
// [quiet]: see spec/chain.pml.
func (m *stagedMemory) Revoke(ctx context.Context) error {
	s := m.s
	m.mu.Lock()
	m.revoked.Store(true)
	if m.self != nil {
		m.self.retire() // a hop that was given up may list it for ever
		m.self = nil
	}
	if m.active > 0 && m.quiet == nil {
		m.quiet = make(chan struct{})
	}
	quiet := m.quiet
	m.mu.Unlock()
	if quiet != nil {
		s.mu.Lock()
		for w := range s.windows {
			w.loop.push(func() { w.stopHops(m, ErrRevoked) })
		}
		s.mu.Unlock()
		select {
		case <-quiet:
		case <-ctx.Done():
			return fmt.Errorf("hops for peers are under way: %w", driver.ContextError(ctx))
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.memories[m.key] == m {
		delete(s.memories, m.key)
	}
	return nil
}

// own returns the memory as the engine's own peer knows it.
func (m *stagedMemory) own(self *Peer) (*Remote, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.revoked.Load() {
		return nil, ErrRevoked
	}
	if m.self != nil && m.self.p == self {
		return m.self, nil
	}
	tokens, err := m.s.e.tokens(m.region.mems)
	if err != nil {
		return nil, err
	}
	if m.self != nil {
		m.self.retire()
	}
	seg := &m.region.seg
	m.self = newRemote(self, m.region.name, seg.Kind, false, seg.Len, tokens)
	m.self.only = seg.Only
	return m.self, nil
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine/internal/exchange"
)

// stagedMemory is a registration as the stager knows it: the memories of the other lanes,
// through which this engine itself reaches the bytes.
type stagedMemory struct {
	s      *stager
	key    uint32
	region *Region // in no table: segment and memories alone

	shown atomic.Pointer[epoch] // by tokens; Fence alone changes it, under mu

	mu     sync.Mutex // guards what follows
	self   *Remote    // the same as memory of the engine's own peer
	active int        // hops for peers
	quiet  chan struct{}
}

// epoch is what the tokens of an epoch show: its number, and a secret, since a peer can count, too.
type epoch struct {
	secret [16]byte
	number uint64
}

// register makes a segment known that the other lanes know by mems.
func (s *stager) register(seg driver.Segment, mems []driver.Memory) driver.Memory {
	m := &stagedMemory{s: s, region: &Region{e: s.e, name: "(staged)", seg: seg, mems: mems,
		private: true}}
	m.shown.Store(&epoch{secret: seg.Secret})
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
	if m.region.seg.Kind == driver.DRAM {
		return dst, nil
	}
	shown := m.shown.Load()
	dst = append(dst, shown.secret[:]...)
	dst = binary.LittleEndian.AppendUint32(dst, m.key)
	return binary.LittleEndian.AppendUint64(dst, shown.number), nil
}

// enter admits a hop that shows this token, until leave.
func (s *stager) enter(token []byte) (*stagedMemory, error) {
	if len(token) != exchange.HopToken {
		return nil, driver.ErrBadToken
	}
	m := s.memory(binary.LittleEndian.Uint32(token[16:]))
	if m == nil {
		return nil, ErrRevoked
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if subtle.ConstantTimeCompare(token[:16], m.shown.Load().secret[:]) != 1 {
		return nil, ErrRevoked // the key has gone to another memory, or was never given out
	}
	if binary.LittleEndian.Uint64(token[20:]) != m.shown.Load().number {
		return nil, ErrRevoked
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

// Fence implements driver.Backend: no hop for a peer begins [fence], and those under way end
// [quiet]: see spec/chain.pml.
func (s *stager) Fence(ctx context.Context, key uint32) error {
	m := s.memory(key)
	if m == nil {
		return nil
	}
	m.mu.Lock()
	next := &epoch{number: m.shown.Load().number + 1}
	rand.Read(next.secret[:])
	m.shown.Store(next)
	if m.self != nil { // with tokens of the other lanes' epochs of before
		m.self.retire()
		m.self = nil
	}
	if m.active == 0 {
		m.mu.Unlock()
		return nil
	}
	if m.quiet == nil {
		m.quiet = make(chan struct{})
	}
	quiet := m.quiet
	m.mu.Unlock()
	s.mu.Lock()
	for w := range s.windows {
		w.loop.push(&fenced{w, m})
	}
	s.mu.Unlock()
	select {
	case <-quiet:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("hops for peers are under way: %w", driver.ContextError(ctx))
	}
}

// fenced has a window's hops of a memory end soon.
type fenced struct {
	w *window
	m *stagedMemory
}

func (f *fenced) happen() {
	for i := range f.w.hops {
		if h := &f.w.hops[i]; h.memory == f.m {
			h.stop(ErrRevoked)
		}
	}
}

// Close implements driver.Memory.
func (m *stagedMemory) Close() error {
	m.s.mu.Lock()
	delete(m.s.memories, m.key)
	m.s.mu.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.self != nil {
		m.self.retire() // a hop that was given up may list it for ever
		m.self = nil
	}
	return nil
}

// own returns the memory as the engine's own peer knows it.
func (m *stagedMemory) own(self *Peer) (*Remote, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
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

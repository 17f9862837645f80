// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/session"
)

// memory is one registration.
type memory struct {
	b     *Backend
	key   uint32
	epoch uint64 // the generation of the key
	span
	secret   [16]byte
	readOnly bool
	pinned   *pinned
	release  func() // lets other backends move the pages again

	turn    session.Turn // of what grants or revokes; guards what follows
	granted bool         // the NICs were asked to take requests, and may still
	at      uint64       // the addresses by which they know what is granted
	shown   bool         // C knows the memory
	gone    atomic.Bool  // the proof is there, and the key may be another memory's

	mu           sync.Mutex // no longer than it takes to write a few fields
	revoked      bool
	peersWithKey map[*inbound]struct{} // that were told the NICs' keys, and have queue pairs to us
}

// Register implements driver.Backend. The range is pinned on every rail, unless it is a
// part of one that is. Peers reach it once the first of them has imported a token.
//
// Device memory is pinned on the rails that take its dma-buf or, with nvidia_peermem, its
// address; the others carry none of it, and Explain says why. Where no rail does the error
// is a *driver.UnavailableError, or what the registrations failed with.
func (b *Backend) Register(seg driver.Segment) (driver.Memory, error) {
	if seg.Kind != driver.DRAM && seg.Kind != driver.HBM {
		return nil, fmt.Errorf("register %v memory: %w", seg.Kind, driver.ErrNotSupported)
	}
	if err := seg.Check(); err != nil {
		return nil, fmt.Errorf("register memory: %w", err)
	}
	if seg.Kind == driver.HBM {
		if err := hostmem.CheckNotLent(seg.Addr, seg.Len); err != nil {
			return nil, err
		}
	}
	if !b.gate.Enter() {
		return nil, fmt.Errorf("register memory: %w", driver.ErrClosed)
	}
	defer b.gate.Exit()
	m, err := b.register(&seg)
	if err != nil {
		return nil, fmt.Errorf("register memory: %w", err)
	}
	return m, nil
}

func (b *Backend) register(seg *driver.Segment) (*memory, error) {
	m := &memory{b: b, span: spanOf(seg), secret: seg.Secret, readOnly: seg.ReadOnly,
		turn: session.NewTurn(), peersWithKey: map[*inbound]struct{}{}}
	var err error
	if m.release, err = hold(seg); err != nil {
		return nil, err
	}
	if m.pinned, err = b.pinnings.use(&m.span, seg.DMABuf, seg.ReadOnly); err != nil {
		m.release()
		return nil, err
	}
	if m.key, m.epoch, err = b.table.Take(); err != nil {
		return nil, errors.Join(err, m.unpin())
	}
	if err := b.show(m); err != nil {
		b.table.Free(m.key)
		return nil, errors.Join(err, m.unpin())
	}
	m.shown = true
	b.table.Put(m.key, m)
	return m, nil
}

// show makes it known to C.
func (b *Backend) show(m *memory) error {
	if m.device == onHost {
		return b.net.show(m.key, m.bytes, m.pinned.pins, b.prefers(&m.span))
	}
	return b.net.showDevice(m.key, m.base, m.size, m.pinned.pins, b.prefers(&m.span))
}

// hold keeps the pages where the NICs will know them.
func hold(seg *driver.Segment) (release func(), err error) {
	if h, ok := seg.Shared.(driver.Holder); ok {
		return h.Hold()
	}
	return func() {}, nil
}

// unpin gives back what hold and pinnings.use took.
func (m *memory) unpin() error {
	if err := m.b.pinnings.unuse(m.pinned); err != nil {
		return err // the NIC may work on the pages still
	}
	m.release()
	return nil
}

// Key implements driver.Memory.
func (m *memory) Key() uint32 { return m.key }

// AppendToken implements driver.Memory.
func (m *memory) AppendToken(dst []byte) ([]byte, error) {
	m.mu.Lock()
	t := session.Token{Secret: m.secret, Key: m.key, Epoch: m.epoch, Size: m.size}
	revoked := m.revoked
	m.mu.Unlock()
	if revoked {
		return dst, driver.ErrClosed
	}
	return t.Append(dst, &m.b.address.owner), nil
}

// opens checks what a peer shows. Preconditions: m.mu is held.
func (m *memory) opens(q *importRequest) session.Status {
	switch {
	case m.revoked || q.epoch < m.epoch:
		return session.StatusRevoked
	case q.epoch > m.epoch || subtle.ConstantTimeCompare(m.secret[:], q.secret[:]) != 1:
		return session.StatusBadToken
	}
	return session.StatusOK
}

// answer tells a peer how to reach the memory, if it shows its secret and epoch. The NICs learn of
// their keys first, which may take long; when the memory is revoked meanwhile, no peer is told of
// what they were granted, and Revoke takes it back.
func (m *memory) answer(c *inbound, q *importRequest) {
	a := importAnswer{id: q.id}
	m.mu.Lock()
	a.status = m.opens(q)
	m.mu.Unlock()
	var granted []uint32
	if a.status == session.StatusOK {
		a.base, granted, a.status = m.grant()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if a.status == session.StatusOK {
		a.status = m.opens(q)
	}
	if a.status == session.StatusOK {
		m.peersWithKey[c] = struct{}{}
		c.hasKeys.Store(true)
		a.readOnly, a.size = m.readOnly, m.size
		a.keys = c.keysOf(granted)
	}
	c.ch.send(&a) // under the lock: the news that it is revoked comes after
}

// removePeer notes that a peer has no queue pair to us any more.
func (m *memory) removePeer(c *inbound) {
	m.mu.Lock()
	delete(m.peersWithKey, c)
	m.mu.Unlock()
}

// grant has the NICs take requests of peers, and returns the address that they know the memory by,
// and their keys by rail.
func (m *memory) grant() (at uint64, nicKeys []uint32, status session.Status) {
	_ = m.turn.Take(context.Background()) // never fails
	defer m.turn.Give()
	if m.isRevoked() {
		return 0, nil, session.StatusRevoked
	}
	var err error
	if !m.granted {
		if m.at, err = m.b.addressOfGrant(m); err != nil {
			return 0, nil, session.StatusFull // a NIC keeps a queue pair: later, perhaps
		}
	}
	m.granted = true // before the NICs have it: Revoke takes it back
	flags := m.b.pinFlags()
	if m.readOnly {
		flags |= verbs.ReadOnly
	}
	granted := make([]uint32, len(m.b.rails))
	err = m.b.onRails(func(r *rail) (err error) {
		if m.pinned.pins[r.index] == nil {
			return nil // 0: not over this rail
		}
		granted[r.index], err = m.b.net.Grant(m.key, r.index, m.at, flags)
		return err
	})
	if err != nil {
		return 0, nil, session.StatusFull // pinned once more than this machine lets us
	}
	return m.at, granted, session.StatusOK
}

func (m *memory) isRevoked() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.revoked
}

// span is a range that the NICs are to know: of host memory, or of a device's.
type span struct {
	bytes      []byte // host memory; nil: a device's, which has an address alone
	base, size uint64
	device     int // ordinal; onHost: host memory
}

const onHost = -1

func spanOf(seg *driver.Segment) span {
	if seg.Kind == driver.HBM {
		return span{base: seg.Addr, size: seg.Len, device: seg.Device}
	}
	return span{bytes: seg.Mem, base: addressOf(seg.Mem), size: seg.Len, device: onHost}
}

func (s *span) end() uint64 { return s.base + s.size }

// holds reports whether all of another range lies within.
func (s *span) holds(other *span) bool {
	return s.device == other.device && s.base <= other.base && s.end() >= other.end()
}

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
	release  func() // ends hold

	revokeLock session.ContextLock // one grant or revoke at a time; guards the next three
	granted    bool                // the NICs may accept requests of peers
	at         uint64              // the first address of the grant
	mapped     bool                // csrc/verbs accepts the key in batches
	gone       atomic.Bool         // the memory is revoked, and its key may be another's
	proving    atomic.Bool         // proveBeside has a goroutine

	mu           sync.Mutex // held only briefly
	revoked      bool
	peersWithKey map[*inbound]struct{} // connections whose peers have received remote keys
}

// Register implements driver.Backend. It pins the range on every rail, unless the range is part of
// one that is pinned. The NICs accept requests of peers only after the first import of a token.
//
// Device memory is pinned on the rails that accept its dma-buf or, with nvidia_peermem, its
// address. The other rails do not carry it, and Explain says why. If no rail accepts it, the error
// is a *driver.UnavailableError, or wraps the errors of the rails.
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
		revokeLock: session.NewContextLock(), peersWithKey: map[*inbound]struct{}{}}
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
	err = b.net.Map(m.key, m.base, m.size, m.pinned.pins, b.nearestTo(&m.span))
	if err != nil {
		b.table.Free(m.key)
		return nil, errors.Join(err, m.unpin())
	}
	m.mapped = true
	b.table.Put(m.key, m)
	return m, nil
}

// hold prevents a Renew from replacing the pages until release is called.
func hold(seg *driver.Segment) (release func(), err error) {
	if h, ok := seg.Shared.(driver.Holder); ok {
		return h.Hold()
	}
	return func() {}, nil
}

// unpin undoes pinnings.use and hold.
func (m *memory) unpin() error {
	if err := m.b.pinnings.unuse(m.pinned); err != nil {
		return err // keep the hold: the NIC may still use the pages
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

// checkToken checks the secret and the epoch of an import. Preconditions: m.mu is held.
func (m *memory) checkToken(q *importRequest) session.Status {
	switch {
	case m.revoked || q.epoch < m.epoch:
		return session.StatusRevoked
	case q.epoch > m.epoch || subtle.ConstantTimeCompare(m.secret[:], q.secret[:]) != 1:
		return session.StatusBadToken
	}
	return session.StatusOK
}

// answer answers an import. If the token is valid, it grants the memory and sends the peer the
// remote keys. A grant may take long. If the memory is revoked meanwhile, answer sends no keys, and
// Revoke takes the grant back.
func (m *memory) answer(c *inbound, q *importRequest) {
	a := importAnswer{id: q.id}
	m.mu.Lock()
	a.status = m.checkToken(q)
	m.mu.Unlock()
	var granted []uint32
	if a.status == session.StatusOK {
		a.base, granted, a.status = m.grant()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if a.status == session.StatusOK {
		a.status = m.checkToken(q)
	}
	if a.status == session.StatusOK {
		m.peersWithKey[c] = struct{}{}
		c.hasKeys.Store(true)
		a.readOnly, a.size = m.readOnly, m.size
		a.keys = c.keysOf(granted)
	}
	c.ch.send(&a) // with mu held, so that end sends expired after the answer
}

// removePeer notes that the queue pairs of a connection have ended.
func (m *memory) removePeer(c *inbound) {
	m.mu.Lock()
	delete(m.peersWithKey, c)
	m.mu.Unlock()
}

// grant makes the NICs accept requests of peers for the memory. It returns the memory's address in
// these requests, and the remote keys by rail.
func (m *memory) grant() (at uint64, nicKeys []uint32, status session.Status) {
	_ = m.revokeLock.Lock(context.Background()) // never fails
	defer m.revokeLock.Unlock()
	if m.isRevoked() {
		return 0, nil, session.StatusRevoked
	}
	var err error
	if !m.granted {
		if m.at, err = m.b.addressOfGrant(m); err != nil {
			return 0, nil, session.StatusFull // a NIC keeps a queue pair; a later import may work
		}
	}
	m.granted = true // set before net.Grant, so that Revoke takes back a partial grant
	flags := m.b.pinFlags()
	if m.readOnly {
		flags |= verbs.ReadOnly
	}
	granted := make([]uint32, len(m.b.rails))
	err = m.b.onRails(func(r *rail) (err error) {
		if m.pinned.pins[r.index] == nil {
			return nil // key 0: not accessible over this rail
		}
		granted[r.index], err = m.b.net.Grant(m.key, r.index, m.at, flags)
		return err
	})
	if err != nil {
		return 0, nil, session.StatusFull // most likely RLIMIT_MEMLOCK, see explainPin
	}
	return m.at, granted, session.StatusOK
}

func (m *memory) isRevoked() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.revoked
}

// span is a range of host memory or device memory.
type span struct {
	bytes      []byte // host memory; nil: device memory, which has only an address
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

// holds reports whether the range contains all of another one.
func (s *span) holds(other *span) bool {
	return s.device == other.device && s.base <= other.base && s.end() >= other.end()
}

// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/lentmem"
	"github.com/sluicehq/sluice/internal/session"
)

// memory is one registration.
type memory struct {
	b   *Backend
	key uint32
	span
	secret   [16]byte
	readOnly bool
	pinned   *pinned
	release  func() // lets other backends move the pages again

	fencing  chan struct{} // has one place: the holder grants, fences or closes
	gone     bool          // guarded by it: nothing is left to close
	unmapped bool          // likewise: but for the pins
	granted  bool          // guarded by it: the NICs were asked to take requests, and may still
	at       uint64        // likewise: the addresses by which they know what is granted

	mu     sync.Mutex // no longer than it takes to write a few fields
	closed bool
	epoch  uint64
	told   map[*inbound]struct{} // peers that know the keys of this epoch
	owed   map[*inbound]struct{} // peers that knew keys of epochs that are not proved ended
	due    bool                  // an epoch has ended since the last proof
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
		if err := lentmem.Check(seg.Addr, seg.Len); err != nil {
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
		fencing: make(chan struct{}, 1)}
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
		b.table.GiveBack(m.key, m.epoch)
		return nil, errors.Join(err, m.unpin())
	}
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
	closed := m.closed
	m.mu.Unlock()
	if closed {
		return dst, driver.ErrClosed
	}
	return t.Append(dst, &m.b.address.owner), nil
}

// opens checks what a peer shows. Preconditions: m.mu is held.
func (m *memory) opens(q *importRequest) session.Status {
	switch {
	case m.closed || q.epoch < m.epoch:
		return session.StatusRevoked
	case q.epoch > m.epoch || subtle.ConstantTimeCompare(m.secret[:], q.secret[:]) != 1:
		return session.StatusBadToken
	}
	return session.StatusOK
}

// answer tells a peer how to reach the memory, if it shows the secret and the epoch of
// now. The NICs learn of their keys first, which may take long; when the epoch ends
// meanwhile, what they were granted is the next epoch's, and no peer is told of it.
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
		m.tell(c)
		a.readOnly, a.size = m.readOnly, m.size
		a.keys = c.keysOf(granted)
	}
	c.ch.send(a.encode()) // under the lock: the news that the epoch has ended comes after
}

// tell notes which peer knows the keys. Preconditions: m.mu is held.
func (m *memory) tell(c *inbound) {
	if m.told == nil {
		m.told = make(map[*inbound]struct{})
	}
	m.told[c] = struct{}{}
	c.knowing.Lock()
	c.told = true
	c.knows[m] = struct{}{}
	c.knowing.Unlock()
}

// forget notes that a peer has no queue pair to us any more.
func (m *memory) forget(c *inbound) {
	m.mu.Lock()
	delete(m.told, c)
	m.mu.Unlock()
}

// grant has the NICs take requests of peers, and returns the address that they know the memory by,
// and their keys by rail. A NIC gives the same key again until it forgets it, so the epochs before
// are proved to be over first: a fence that ran out of time owes that proof, and would take it from
// this epoch otherwise.
func (m *memory) grant() (at uint64, nicKeys []uint32, status session.Status) {
	m.fencing <- struct{}{}
	defer func() { <-m.fencing }()
	if m.unmapped {
		return 0, nil, session.StatusRevoked
	}
	err := m.prove(context.Background())
	if err != nil {
		return 0, nil, session.StatusFull // the NIC keeps a key: later, perhaps
	}
	if !m.granted {
		if m.at, err = m.b.addressOfGrant(m); err != nil {
			return 0, nil, session.StatusFull // a NIC keeps a queue pair: later, perhaps
		}
	}
	m.granted = true // before the NICs have it: a fence from now on takes it back
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

func (m *memory) isClosed() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.closed
}

// Close implements driver.Memory. It fences what was not fenced, so that nothing lands
// after it.
func (m *memory) Close() error {
	if !m.b.gate.Enter() {
		return m.b.Close() // which closes every memory, or says why not
	}
	defer m.b.gate.Exit()
	return m.close()
}

// close does it. After an error, which leaves the memory known but of no use to peers, it may be
// called again, and the backend's Close does.
func (m *memory) close() error {
	m.fencing <- struct{}{}
	defer func() { <-m.fencing }()
	if m.gone {
		return nil
	}
	if err := m.unmap(); err != nil {
		return fmt.Errorf("close memory: %w", err)
	}
	if err := m.unpin(); err != nil {
		return fmt.Errorf("close memory: %w", err)
	}
	m.gone = true
	m.b.table.Remove(m.key)
	m.b.table.GiveBack(m.key, m.epoch+1)
	return nil
}

// unmap makes it unknown to peers and to C, once.
func (m *memory) unmap() error {
	if m.unmapped {
		return nil
	}
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	m.endEpoch()
	if err := m.prove(context.Background()); err != nil {
		return err
	}
	if err := m.b.net.Unmap(m.key); err != nil {
		return err
	}
	m.unmapped = true
	return nil
}

var errUnknownKey = fmt.Errorf("unknown key: %w", driver.ErrBounds)

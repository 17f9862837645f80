// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"crypto/rand"
	"crypto/subtle"
	"encoding/binary"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// memory is one registration.
type memory struct {
	b        *Backend
	key      uint32
	epoch    uint64 // the generation of the key
	ticket   uint64 // what messages must show
	bytes    []byte
	secret   [16]byte
	readOnly bool

	landings landings
	pinner   runtime.Pinner // of the words of landings and of the ranges, which C looks at

	revokeLock session.ContextLock // held by Revoke
	gone       bool                // guarded by revokeLock: the key may be another memory's

	mu      sync.Mutex // no longer than a crossing that waits for nothing
	revoked bool
}

// Register implements driver.Backend. Nothing is pinned or lent: the memory is only written down.
func (b *Backend) Register(seg driver.Segment) (driver.Memory, error) {
	if seg.Kind != driver.DRAM {
		return nil, fmt.Errorf("register %v memory: %w", seg.Kind, driver.ErrNotSupported)
	}
	if err := seg.Check(); err != nil {
		return nil, fmt.Errorf("register memory: %w", err)
	}
	if !b.gate.Enter() {
		return nil, fmt.Errorf("register memory: %w", driver.ErrClosed)
	}
	defer b.gate.Exit()
	m := &memory{b: b, landings: landingsOf(seg.Shared), bytes: seg.Mem, secret: seg.Secret,
		readOnly: seg.ReadOnly, ticket: newTicket(), revokeLock: session.NewContextLock()}
	var err error
	if m.key, m.epoch, err = b.table.Take(); err != nil {
		return nil, fmt.Errorf("register memory: %w", err)
	}
	if m.landings.inside != nil {
		m.pinner.Pin(m.landings.inside)
		m.pinner.Pin(m.landings.phase)
	}
	if seg.Only != nil {
		m.pinner.Pin(&seg.Only[0])
	}
	err = b.net.Map(m.key, ucp.Memory{Mem: m.bytes, ReadOnly: m.readOnly, Ticket: m.ticket,
		Inside: m.landings.inside, Phase: m.landings.phase, Only: seg.Only})
	if err != nil {
		m.pinner.Unpin()
		b.table.Free(m.key)
		return nil, fmt.Errorf("register memory: %w", err)
	}
	b.table.Put(m.key, m)
	return m, nil
}

// newTicket draws a random ticket, so that a peer that was not told the ticket of a memory cannot
// guess it.
func newTicket() uint64 {
	for {
		var b [8]byte
		_, _ = rand.Read(b[:]) // never fails: it ends the program instead
		if t := binary.LittleEndian.Uint64(b[:]); t != 0 {
			return t
		}
	}
}

// landings are the words by which a write of C keeps out of a Renew; nil: there is none.
type landings struct {
	inside *atomic.Int64
	phase  *atomic.Int32
}

func landingsOf(s driver.Shared) (l landings) {
	if s, ok := s.(interface {
		Landings() (*atomic.Int64, *atomic.Int32)
	}); ok {
		l.inside, l.phase = s.Landings()
	}
	return l
}

// Key implements driver.Memory.
func (m *memory) Key() uint32 { return m.key }

// AppendToken implements driver.Memory.
func (m *memory) AppendToken(dst []byte) ([]byte, error) {
	m.mu.Lock()
	revoked := m.revoked
	m.mu.Unlock()
	if revoked {
		return dst, driver.ErrClosed
	}
	t := session.Token{Secret: m.secret, Key: m.key, Epoch: m.epoch, Size: uint64(len(m.bytes))}
	return t.Append(dst, &m.b.address.owner), nil
}

// answer tells a peer how to reach the memory, if it shows its secret and
// epoch.
func (m *memory) answer(q *importRequest) importAnswer {
	m.mu.Lock()
	defer m.mu.Unlock()
	a := importAnswer{id: q.id}
	switch {
	case m.revoked || q.epoch < m.epoch:
		a.status = session.StatusRevoked
	case q.epoch > m.epoch || subtle.ConstantTimeCompare(m.secret[:], q.secret[:]) != 1:
		a.status = session.StatusBadToken
	default:
		a.readOnly, a.size, a.ticket = m.readOnly, uint64(len(m.bytes)), m.ticket
	}
	return a
}

// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/control"
	"github.com/sluicehq/sluice/internal/keys"
)

// memory is one registration, known to both contexts under the same key.
type memory struct {
	b        *Backend
	key      uint32
	bytes    []byte
	secret   [16]byte
	readOnly bool
	only     driver.Ranges
	in       *allocation // nil: not UCX's own memory, or peers may reach parts alone

	landings landings
	pinner   runtime.Pinner // of the words of landings, which C looks at

	fencing chan struct{} // has one place: its holder fences or closes
	gone    bool          // guarded by it: nothing is left to close

	mu     sync.Mutex // no longer than a crossing that does not wait
	closed bool
	epoch  uint64
	ticket uint64 // what served messages must show in this epoch
	told   uint64 // the last epoch in which a peer was told the ticket; 0: none
	proved uint64 // the last epoch that is proved to have ended
}

// Register implements driver.Backend. Nothing is pinned: the near context maps
// what is UCX's own, all other memory is only written down.
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
		readOnly: seg.ReadOnly, only: seg.Only, fencing: make(chan struct{}, 1)}
	var err error
	if m.key, m.epoch, err = b.table.Take(); err != nil {
		return nil, fmt.Errorf("register memory: %w", err)
	}
	m.proved = m.epoch - 1
	m.ticket = newTicket()
	if m.only == nil { // else our thread is to look where each byte goes
		m.in = b.allocations.use(seg.Mem)
	}
	if err := m.show(); err != nil {
		b.allocations.unuse(m.in)
		b.table.GiveBack(m.key, m.epoch)
		return nil, fmt.Errorf("register memory: %w", err)
	}
	b.table.Put(m.key, m)
	return m, nil
}

// newTicket draws what a peer's messages must show: a peer that did not ask for this
// epoch's does not guess it.
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

// show makes the memory known to all contexts, or to none.
func (m *memory) show() error {
	if m.landings.inside != nil {
		m.pinner.Pin(m.landings.inside)
		m.pinner.Pin(m.landings.phase)
	}
	if m.only != nil {
		m.pinner.Pin(&m.only[0])
	}
	for i, l := range m.b.sides {
		u := ucp.Memory{Mem: m.bytes, ReadOnly: m.readOnly, Ticket: m.ticket,
			Inside: m.landings.inside, Phase: m.landings.phase, Only: m.only}
		if l.near {
			u.In = m.in.origin()
		}
		if err := l.net.Map(m.key, u); err != nil {
			m.hide(m.b.sides[:i])
			return err
		}
	}
	return nil
}

func (m *memory) hide(sides []*side) {
	for _, l := range sides {
		l.net.Unmap(m.key)
	}
	m.pinner.Unpin()
}

// Key implements driver.Memory.
func (m *memory) Key() uint32 { return m.key }

func (m *memory) isClosed() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.closed
}

// AppendToken implements driver.Memory.
func (m *memory) AppendToken(dst []byte) ([]byte, error) {
	m.mu.Lock()
	t := keys.Token{Secret: m.secret, Key: m.key, Epoch: m.epoch, Size: uint64(len(m.bytes))}
	closed := m.closed
	m.mu.Unlock()
	if closed {
		return dst, driver.ErrClosed
	}
	return t.Append(dst, &m.b.address.owner), nil
}

// answer tells a peer how to reach the memory, if it shows the secret and the
// epoch of now.
func (m *memory) answer(l *side, q *importRequest) importAnswer {
	m.mu.Lock()
	defer m.mu.Unlock()
	a := importAnswer{id: q.id}
	switch {
	case m.closed || q.epoch < m.epoch:
		a.status = control.Revoked
	case q.epoch > m.epoch || subtle.ConstantTimeCompare(m.secret[:], q.secret[:]) != 1:
		a.status = control.BadToken
	default:
		m.told = m.epoch
		a.readOnly, a.size, a.ticket = m.readOnly, uint64(len(m.bytes)), m.ticket
		if l.near && m.only == nil {
			a.export, _ = l.net.Export(m.key) // none: our thread moves the bytes
		}
	}
	return a
}

// Close implements driver.Memory. It fences what was not fenced, with the
// strong means as well, so that nothing lands after it.
func (m *memory) Close() error {
	if !m.b.gate.Enter() {
		return m.b.Close() // which closes every memory, or says why not
	}
	defer m.b.gate.Exit()
	return m.close(time.Now().Add(m.b.cfg.FenceGrace))
}

// close does it. After an error, which leaves the memory known but of no use to
// peers, it may be called again, and the backend's Close does.
func (m *memory) close(deadline time.Time) error {
	m.fencing <- struct{}{}
	defer func() { <-m.fencing }()
	if m.gone {
		return nil
	}
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	if err := errors.Join(m.turn(), m.proof(context.Background(), deadline)); err != nil {
		return fmt.Errorf("close memory: %w", err)
	}
	m.gone = true
	m.b.table.Remove(m.key)
	m.hide(m.b.sides)
	m.b.allocations.unuse(m.in)
	m.b.table.GiveBack(m.key, m.epoch+1)
	return nil
}

var errUnknownKey = fmt.Errorf("unknown key: %w", driver.ErrBounds)

// isLate reports whether an error only says that the proof is not there yet.
func isLate(err error) bool { return errors.Is(err, driver.ErrTimeout) }

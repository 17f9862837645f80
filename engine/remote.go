// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// Remote is a region of a peer, or a part of one that was leased to us.
type Remote struct {
	p        *Peer
	name     string
	kind     driver.Kind
	readOnly bool
	size     uint64
	only     driver.Ranges // what it may be used for; nil: all of it
	tokens   [][]byte      // by lane; nil: that backend does not reach it
	own      *Region       // of Self: the registration that it stands for

	mu       sync.Mutex // guards what follows
	users    int        // transfers that list it
	retired  bool       // replaced: what was imported goes with the last of them
	imports  []imported // by lane
	route    Route      // of the cached choice
	routeFor *Region
	chosen   *conn
	chosenAt uint32
	until    time.Duration // that the choice stands for new lists
}

// imported is the outcome of Peer.Import, kept until the Remote is closed.
type imported struct {
	known bool // otherwise it is tried again
	key   uint32
	err   error
}

func newRemote(p *Peer, name string, kind driver.Kind, readOnly bool, size uint64,
	tokens [][]byte) *Remote {
	return &Remote{p: p, name: name, kind: kind, readOnly: readOnly, size: size, tokens: tokens,
		imports: make([]imported, len(tokens))}
}

// Name returns the peer's name for the region.
func (m *Remote) Name() string { return m.name }

// Size returns its length in bytes.
func (m *Remote) Size() uint64 { return m.size }

// Kind returns where its bytes live.
func (m *Remote) Kind() driver.Kind { return m.kind }

// ReadOnly reports whether peers may only read it.
func (m *Remote) ReadOnly() bool { return m.readOnly }

// key imports the token of a lane at first use. It may wait for the peer.
func (m *Remote) key(lane int) (uint32, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if lane == m.p.e.stager.lane.index {
		return m.p.staged().p.(*stagedPeer).key(m)
	}
	at := &m.imports[lane]
	if at.known {
		return at.key, at.err
	}
	key, size, err := m.p.conns[lane].p.Import(m.tokens[lane])
	if err == nil && size != m.size {
		m.p.conns[lane].p.Drop(key)
		err = fmt.Errorf("described with %d bytes but has %d: %w", m.size, size, ErrCorrupt)
	}
	*at = imported{known: err == nil || isFinal(err), key: key, err: err}
	return key, err
}

// isFinal reports whether an import that failed would fail again: the token is at
// fault, not the moment.
func isFinal(err error) bool {
	return errors.Is(err, ErrRevoked) || errors.Is(err, driver.ErrBadToken) ||
		errors.Is(err, ErrCorrupt) || errors.Is(err, ErrNotSupported)
}

// importError returns the error of an import that failed, if one did.
func (m *Remote) importError() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, at := range m.imports {
		if at.err != nil {
			return at.err
		}
	}
	return nil
}

// cachedRoute saves the search on the way of Add: neighbours in a list mostly
// have the same pair of memories. The first of a list searches anew from time to time, since what
// was measured changes.
func (m *Remote) cachedRoute(local *Region, route Route, first bool) (*conn, uint32, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.chosen == nil || m.routeFor != local || m.route != route || m.chosen.isLost() ||
		first && m.p.e.now() >= m.until {
		return nil, 0, false
	}
	if sp, ok := m.chosen.p.(*stagedPeer); ok && !sp.knows(local, m, route.Durable) {
		return nil, 0, false // it went by a connection that was lost
	}
	return m.chosen, m.chosenAt, true
}

func (m *Remote) cacheRoute(local *Region, route Route, c *Candidate) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.routeFor, m.route, m.chosen, m.chosenAt = local, route, c.conn, c.key
	m.until = m.p.e.now() + rateHalfLife
}

// Close forgets what was imported; the next Add imports it anew. It is ErrBusy
// while a Transfer lists it (Reset or Close that first): the key may be given to
// other memory at once.
func (m *Remote) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.users > 0 {
		return &OpError{Op: "close remote " + m.name, Peer: m.p.name,
			Err: fmt.Errorf("reset the transfers that list it first: %w", ErrBusy)}
	}
	m.drop()
	return nil
}

// drop forgets what was imported.
// Preconditions: m.mu is held.
func (m *Remote) drop() {
	for i := range m.imports {
		if at := &m.imports[i]; at.known && at.err == nil {
			m.p.conns[i].p.Drop(at.key)
		}
		m.imports[i] = imported{}
	}
	m.p.staged().p.(*stagedPeer).forget(m)
	m.chosen, m.routeFor = nil, nil
}

// retire drops what was imported, now or when no Transfer lists the Remote any more. The
// registration for which it stands has been replaced.
func (m *Remote) retire() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.retired = true
	if m.users == 0 {
		m.drop()
	}
}

// letGo ends the use by one Transfer.
func (m *Remote) letGo() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.users--; m.users == 0 && m.retired {
		m.drop()
	}
}

// ReadAt implements io.ReaderAt: one read of the peer's memory, through a staging
// buffer. It blocks until the bytes are here.
func (m *Remote) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, fmt.Errorf("read remote %s at %d: %w", m.name, off, ErrBounds)
	}
	if uint64(off) >= m.size {
		return 0, io.EOF
	}
	n := int(min(uint64(len(p)), m.size-uint64(off)))
	done, err := m.staged(Read, p[:n], uint64(off))
	if err == nil && done < len(p) {
		err = io.EOF
	}
	return done, err
}

// WriteAt implements io.WriterAt: one write to the peer's memory, through a
// staging buffer. It blocks until the bytes are placed.
func (m *Remote) WriteAt(p []byte, off int64) (int, error) {
	if off < 0 || uint64(off) > m.size || uint64(len(p)) > m.size-uint64(off) {
		return 0, fmt.Errorf("write remote %s: %d bytes at %d of %d: %w", m.name, len(p), off,
			m.size, ErrBounds)
	}
	return m.staged(Write, p, uint64(off))
}

// stagingBytes is the piece in which ReadAt and WriteAt move.
const stagingBytes = 1 << 20 // 1 MiB

// staged moves p in pieces through memory outside the Go heap, which every
// backend can take.
func (m *Remote) staged(op Op, p []byte, off uint64) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	s, err := m.p.borrowStaging()
	if err != nil {
		return 0, err
	}
	defer m.p.returnStaging(s)
	moved := 0
	for moved < len(p) {
		n := min(len(p)-moved, stagingBytes)
		if op == Write {
			copy(s.region.Bytes(), p[moved:moved+n])
		}
		if err := s.move(op, m, off+uint64(moved), uint64(n)); err != nil {
			return moved, err
		}
		if op == Read {
			copy(p[moved:], s.region.Bytes()[:n])
		}
		moved += n
	}
	return moved, nil
}

// staging is a buffer with its region and transfers, kept by a Peer for reuse.
type staging struct {
	buffer *hostmem.Buffer
	region *Region
	lost   bool // a transfer of it was given up: a backend may still use the bytes
}

func (s *staging) move(op Op, m *Remote, off, n uint64) error {
	t, err := m.p.e.NewTransfer(m.p, op, Route{})
	if err != nil {
		return err
	}
	err = t.Add(s.region, 0, m, off, n)
	if err == nil {
		err = t.Post()
	}
	if err == nil {
		err = t.Wait(context.Background())
	}
	s.lost = t.isUnproven()
	return errors.Join(err, t.Close())
}

// close leaves the bytes mapped where there is no proof: a backend may still use them.
func (s *staging) close() error {
	if err := s.region.Close(); err != nil {
		return err
	}
	return s.buffer.Close()
}

func (p *Peer) borrowStaging() (*staging, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.staging); n > 0 {
		s := p.staging[n-1]
		p.staging = p.staging[:n-1]
		return s, nil
	}
	if p.closed {
		return nil, ErrClosed
	}
	b, err := hostmem.Alloc(stagingBytes, hostmem.Options{Purpose: "staging"})
	if err != nil {
		return nil, err
	}
	r, err := p.e.registerHidden(b.Segment())
	if err != nil {
		return nil, errors.Join(err, b.Close())
	}
	return &staging{buffer: b, region: r}, nil
}

// stagingsMax is how many idle buffers a Peer keeps.
const stagingsMax = 4

func (p *Peer) returnStaging(s *staging) {
	if s.lost {
		return // stays mapped for ever
	}
	p.mu.Lock()
	keep := !p.closed && len(p.staging) < stagingsMax
	if keep {
		p.staging = append(p.staging, s)
	}
	p.mu.Unlock()
	if !keep {
		_ = s.close()
	}
}

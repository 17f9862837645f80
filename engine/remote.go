// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// Remote is a region of a peer, or a part of one that was leased to us.
type Remote struct {
	p        *Peer
	name     string
	kind     driver.Kind
	readOnly bool
	size     uint64
	only     driver.Ranges // the ranges that the lease names; nil: all of it
	tokens   [][]byte      // by lane; nil: that backend does not reach it
	own      *Region       // of Self: the registration that it stands for

	mu       sync.Mutex // guards the fields below
	users    int        // transfers that list it
	retired  bool       // replaced: the imported keys go with the last of them
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
		return m.p.chains().key(m)
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

// Close drops the imported keys; the next Add imports them anew. It is ErrBusy
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

// drop drops the imported keys.
// Preconditions: m.mu is held.
func (m *Remote) drop() {
	for i := range m.imports {
		if at := &m.imports[i]; at.known && at.err == nil {
			m.p.conns[i].p.Drop(at.key)
		}
		m.imports[i] = imported{}
	}
	m.p.chains().forget(m)
	m.chosen, m.routeFor = nil, nil
}

// retire drops the imported keys, now or when no Transfer lists the Remote any more. The
// registration for which it stands has been replaced.
func (m *Remote) retire() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.retired = true
	if m.users == 0 {
		m.drop()
	}
}

// unuse ends the use by one Transfer.
func (m *Remote) unuse() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.users--; m.users == 0 && m.retired {
		m.drop()
	}
}

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
	tokens   [][]byte      // by lane; nil: the backend of that lane does not reach the region
	own      *Region       // the registration that a Remote of Self stands for; else nil

	mu      sync.Mutex // guards the fields below
	users   int        // transfers that list it
	retired bool       // own was replaced: the last user drops the imported keys
	imports []imported // by lane

	// The connection that was chosen for transfers between routeFor and this Remote by this route,
	// and the remote's key there. New lists of entries use the choice until that time.
	route    Route
	routeFor *Region
	chosen   *conn
	chosenAt uint32
	until    time.Duration
}

// imported is the outcome of Peer.Import, kept until the Remote is closed.
type imported struct {
	known bool // key or err is final; otherwise the next use imports again
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

// Close drops the imported keys; the next Add imports them anew. It returns ErrBusy while a
// Transfer lists the Remote, since a key that was dropped may be given to other memory at once:
// Reset or Close the Transfer first.
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

// unuse notes that a Transfer does not list the Remote any more.
func (m *Remote) unuse() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.users--; m.users == 0 && m.retired {
		m.drop()
	}
}

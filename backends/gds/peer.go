// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"bytes"
	"context"
	"fmt"

	"github.com/sluicehq/sluice/backends"
	"github.com/sluicehq/sluice/internal/keys"
)

// peer is a way of a backend to its own files. All is guarded by Backend.mu.
type peer struct {
	b       *Backend
	closed  bool
	imports []remote // by key
	free    []uint32
}

// remote is a token that was accepted. Its memory is nil where the key is free.
type remote struct {
	m     *memory
	epoch uint64
}

var _ interface {
	backends.Peer
	backends.Canceler
	backends.Explainer
	backends.Yielder
} = (*peer)(nil)

// Connect implements backends.Backend, for the backend's own Addr.
func (b *Backend) Connect(ctx context.Context, addr []byte) (backends.Peer, error) {
	if err := ctx.Err(); err != nil {
		return nil, backends.ContextError(ctx)
	}
	if b.closed.Load() {
		return nil, backends.ErrClosed
	}
	if !bytes.Equal(addr, b.addr) {
		return nil, fmt.Errorf("connect: %w: %w", errElsewhere, backends.ErrNotSupported)
	}
	p := &peer{b: b}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed.Load() {
		return nil, backends.ErrClosed
	}
	b.peers[p] = struct{}{}
	return p, nil
}

// Import implements backends.Peer. A token of another backend answers to ErrBadToken and
// ErrNotSupported.
func (p *peer) Import(token []byte) (uint32, uint64, error) {
	p.b.mu.Lock()
	defer p.b.mu.Unlock()
	if p.closed {
		return 0, 0, backends.ErrClosed
	}
	t, err := keys.Decode(token, &p.b.owner)
	if err != nil {
		return 0, 0, fmt.Errorf("import file: %w (%w: %w)", err, errElsewhere, backends.ErrNotSupported)
	}
	m := p.b.table.At(t.Key)
	if m == nil {
		return 0, 0, fmt.Errorf("import file: its registration has ended: %w", backends.ErrRevoked)
	}
	if err := m.open(&t); err != nil {
		return 0, 0, fmt.Errorf("import file: %w", err)
	}
	if n := len(p.free); n > 0 {
		key := p.free[n-1]
		p.free = p.free[:n-1]
		p.imports[key] = remote{m, t.Epoch}
		return key, m.size, nil
	}
	if len(p.imports) >= keys.Limit {
		return 0, 0, fmt.Errorf("import file: all %d keys are taken: %w", keys.Limit, backends.ErrFull)
	}
	p.imports = append(p.imports, remote{m, t.Epoch})
	return uint32(len(p.imports) - 1), m.size, nil
}

// Drop implements backends.Peer.
func (p *peer) Drop(key uint32) {
	p.b.mu.Lock()
	defer p.b.mu.Unlock()
	if uint64(key) < uint64(len(p.imports)) && p.imports[key].m != nil {
		p.imports[key] = remote{}
		p.free = append(p.free, key)
	}
}

// Cancel implements backends.Canceler.
func (p *peer) Cancel(tag uint64) {
	if !p.b.gate.Enter() {
		return
	}
	defer p.b.gate.Exit()
	p.b.mu.Lock()
	p.b.endJobs(backends.ErrAborted, func(j *job) bool { return j.p == p && j.tag == tag })
	p.b.leave()
}

// Close implements backends.Peer.
func (p *peer) Close() error {
	b := p.b
	if !b.gate.Enter() {
		return nil // the backend's Close has closed every peer
	}
	defer b.gate.Exit()
	b.mu.Lock()
	defer b.mu.Unlock()
	p.closed = true
	b.endJobs(backends.ErrClosed, func(j *job) bool { return j.p == p })
	err := b.wait(context.Background(), func() bool { return !b.anyJob(func(j *job) bool { return j.p == p }) })
	p.imports = nil
	delete(b.peers, p)
	return err
}

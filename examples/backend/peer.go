// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"crypto/subtle"
	"encoding/binary"
	"fmt"
	"runtime/debug"
	"sync"

	"github.com/sluicehq/sluice/driver"
)

type peer struct {
	driver.PeerBase // no Help needed, and the peer cannot be lost

	from, to *Backend

	mu      sync.RWMutex // guards what follows; held for reading while bytes are copied
	closed  bool
	imports []*memory // by key; nil: dropped
}

// Connect implements driver.Backend.
func (b *Backend) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	to, ok := backends.Load(string(addr))
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.closed:
		return nil, driver.ErrClosed
	case !ok:
		return nil, fmt.Errorf("connect: no such backend in this process: %w", driver.ErrPeerLost)
	}
	p := &peer{from: b, to: to.(*Backend)}
	b.peers = append(b.peers, p)
	return p, nil
}

// Can implements driver.Peer: descriptors only.
func (p *peer) Can() driver.Can { return 0 }

// Import implements driver.Peer.
func (p *peer) Import(token []byte) (key uint32, size uint64, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return 0, 0, driver.ErrClosed
	}
	if len(token) != 28 {
		return 0, 0, driver.ErrBadToken
	}
	m := p.to.memory(binary.LittleEndian.Uint32(token[16:]))
	size = binary.LittleEndian.Uint64(token[20:])
	if m == nil || subtle.ConstantTimeCompare(m.seg.Secret[:], token[:16]) == 0 ||
		size != m.seg.Len {
		return 0, 0, driver.ErrBadToken
	}
	if m.revoked.Load() {
		return 0, 0, driver.ErrRevoked
	}
	p.imports = append(p.imports, m)
	return uint32(len(p.imports) - 1), size, nil
}

// Drop implements driver.Peer.
func (p *peer) Drop(key uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if int64(key) < int64(len(p.imports)) {
		p.imports[key] = nil
	}
}

// Submit implements driver.Peer. It checks the whole batch before the first byte moves.
func (p *peer) Submit(tag uint64, b *driver.Batch) error {
	if err := b.Check(0); err != nil {
		return err
	}
	p.mu.RLock()
	defer p.mu.RUnlock()
	if p.closed {
		return driver.ErrClosed
	}
	if p.to.isClosed() {
		return driver.ErrPeerLost
	}
	for i := range b.Descs {
		if err := p.check(b.Op, &b.Descs[i]); err != nil {
			return &driver.PieceError{Piece: i, Err: err}
		}
	}
	if !p.from.take() {
		return driver.ErrFull
	}
	c := driver.Completion{Tag: tag}
	for i := 0; i < len(b.Descs) && c.Err == nil; i++ {
		c.Err = p.copy(b.Op, &b.Descs[i])
	}
	p.from.push(c)
	return nil
}

// check returns an error if the batch must not begin.
func (p *peer) check(op driver.Op, d *driver.Desc) error {
	local := p.from.memory(d.LocalKey)
	if local == nil || local.revoked.Load() || int64(d.RemoteKey) >= int64(len(p.imports)) {
		return driver.ErrBounds
	}
	remote := p.imports[d.RemoteKey]
	if remote == nil {
		return driver.ErrBounds
	}
	if op == driver.Write && remote.seg.ReadOnly {
		return driver.ErrReadOnly
	}
	if at := 0; !remote.seg.Only.Has(d.Remote, d.Len, &at) {
		return driver.ErrBounds
	}
	return d.Check(local.seg.Len, remote.seg.Len)
}

// copy moves the bytes of one descriptor under the gate of the peer's memory.
func (p *peer) copy(op driver.Op, d *driver.Desc) error {
	remote := p.imports[d.RemoteKey]
	remote.gate.RLock()
	defer remote.gate.RUnlock()
	if remote.revoked.Load() {
		return driver.ErrRevoked
	}
	local := p.from.memory(d.LocalKey)
	to, from := local.seg.Mem[d.Local:][:d.Len], remote.seg.Mem[d.Remote:][:d.Len]
	shared := local.seg.Shared
	if op == driver.Write {
		to, from, shared = from, to, remote.seg.Shared
	}
	if shared != nil {
		shared.Enter()
		defer shared.Leave()
	}
	return move(to, from)
}

// move copies memory that the program may have unmapped. A memory fault becomes an error of the
// transfer.
func move(to, from []byte) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch fault := recover().(type) {
		case nil:
		case interface{ Addr() uintptr }:
			err = driver.ErrFault
		default:
			panic(fault)
		}
	}()
	copy(to, from)
	return nil
}

// Cancel implements driver.Peer. A batch has ended when its Submit returns, so there is nothing to
// cancel.
func (p *peer) Cancel(uint64) {}

// Explain implements driver.Peer.
func (p *peer) Explain(_, _ uint32) string { return "one copy within the process, in Submit" }

// Close implements driver.Peer. Once it has taken the lock, no copy runs.
func (p *peer) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed, p.imports = true, nil
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/sluicehq/sluice/driver"
)

// extent is a memory as batches name it.
type extent struct {
	size     uint64
	readOnly bool
	tried    bool   // or known not to be read-only
	dropped  bool   // and needed by a batch that is still to be handed on
	mem      []byte // where this process has it, for what breaks the contract
}

// known finds the memory of this process by what tokens begin with: a batch that is held
// up is to be refused in time, and a late write must find its place.
var known = struct {
	sync.RWMutex
	segments map[[16]byte]*memory
}{segments: map[[16]byte]*memory{}}

// memory is a registration.
type memory struct {
	driver.Memory
	b    *Backend
	seg  driver.Segment
	once sync.Once
}

// Register implements driver.Backend.
func (b *Backend) Register(seg driver.Segment) (driver.Memory, error) {
	if b.closed.Load() {
		return nil, driver.ErrClosed
	}
	if err := b.callRules(context.Background(), Register, 0); err != nil {
		return nil, fmt.Errorf("register: %w", err)
	}
	inner, err := b.Backend.Register(seg)
	if err != nil {
		return nil, err
	}
	m := &memory{Memory: inner, b: b, seg: seg}
	b.mu.Lock()
	b.locals[m.Key()] = extent{size: seg.Len, mem: seg.Mem}
	b.mu.Unlock()
	known.Lock()
	known.segments[seg.Secret] = m
	known.Unlock()
	return m, nil
}

// Revoke implements driver.Memory. A rule may delay or refuse it, but the epoch ends. The key may
// be another memory's as soon as the wrapped one is revoked.
func (m *memory) Revoke(ctx context.Context) error {
	m.once.Do(func() {
		m.b.mu.Lock()
		delete(m.b.locals, m.Key())
		m.b.mu.Unlock()
		if !m.b.landsLate {
			m.forget()
		}
	})
	switch err := m.b.callRules(ctx, Revoke, 0); {
	case err == errSkipped:
		return nil
	case err != nil:
		return errors.Join(fmt.Errorf("revoke: %w", err), m.Memory.Revoke(ctx))
	}
	return m.Memory.Revoke(ctx)
}

func (m *memory) forget() {
	known.Lock()
	defer known.Unlock()
	if known.segments[m.seg.Secret] == m {
		delete(known.segments, m.seg.Secret)
	}
}

// forgetLocals forgets the memories of a backend that is closed.
func (b *Backend) forgetLocals() {
	known.Lock()
	defer known.Unlock()
	for secret, m := range known.segments {
		if m.b == b {
			delete(known.segments, secret)
		}
	}
}

// extentOf is what is known of a memory that was imported. Whether another process's is
// read-only is not known until it is tried.
func extentOf(token []byte, size uint64) extent {
	e := extent{size: size}
	if len(token) < 16 {
		return e
	}
	known.RLock()
	defer known.RUnlock()
	if m := known.segments[[16]byte(token[:16])]; m != nil {
		e.readOnly, e.mem, e.tried = m.seg.ReadOnly, m.seg.Mem, true
	}
	return e
}

// untried lists memory that a batch writes to and of which it is not known whether it is
// read-only: the batch is not to begin late, as it may have to be refused.
func (p *peer) untried(x *driver.Batch) (keys []uint32) {
	if x.Op != driver.Write {
		return nil
	}
	p.b.mu.Lock()
	defer p.b.mu.Unlock()
	look := func(key uint32) {
		if !p.imports[key].tried && !slices.Contains(keys, key) {
			keys = append(keys, key)
		}
	}
	if x.Pattern != nil {
		look(x.Pattern.RemoteKey)
	}
	for i := range x.Descs {
		look(x.Descs[i].RemoteKey)
	}
	return keys
}

// tried notes that memory takes writes.
func (p *peer) tried(keys []uint32) {
	p.b.mu.Lock()
	defer p.b.mu.Unlock()
	for _, key := range keys {
		if e, ok := p.imports[key]; ok {
			e.tried = true
			p.imports[key] = e
		}
	}
}

// check refuses at once what the wrapped backend would refuse later.
func (p *peer) check(x *driver.Batch) error {
	b := p.b
	if err := x.Check(p.Can()); err != nil {
		return err
	}
	if x.Tail == driver.NotifyTail && len(x.Notify) > b.caps.MessageMax {
		return fmt.Errorf("notification of %d bytes, at most %d: %w", len(x.Notify),
			b.caps.MessageMax, driver.ErrBounds)
	}
	select {
	case <-p.Lost():
		return driver.ErrPeerLost
	default:
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if x.Pattern != nil {
		local, remote, err := p.extents(x.Op, x.Pattern.LocalKey, x.Pattern.RemoteKey)
		if err != nil {
			return err
		}
		return x.Pattern.Check(local.size, remote.size)
	}
	for i := range x.Descs {
		d := &x.Descs[i]
		local, remote, err := p.extents(x.Op, d.LocalKey, d.RemoteKey)
		if err == nil {
			err = d.Check(local.size, remote.size)
		}
		if err != nil {
			return &driver.PieceError{Piece: i, Err: err}
		}
	}
	return nil
}

// extents looks both keys up.
// Preconditions: b.mu is held.
func (p *peer) extents(op driver.Op, localKey, remoteKey uint32) (local, remote extent, err error) {
	local, ok := p.b.locals[localKey]
	if !ok {
		return local, remote, fmt.Errorf("local key %d: %w", localKey, driver.ErrBounds)
	}
	remote, ok = p.imports[remoteKey]
	switch {
	case !ok || remote.dropped:
		err = fmt.Errorf("remote key %d: %w", remoteKey, driver.ErrBounds)
	case op == driver.Write && remote.readOnly:
		err = driver.ErrReadOnly
	}
	return local, remote, err
}

func sortByTag(list []*flight) {
	slices.SortFunc(list, func(a, b *flight) int { return cmp.Compare(a.tag, b.tag) })
}

// errSkipped says that a call is to be left out, against the contract.
var errSkipped = errors.New("skipped by a fault rule")

// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
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
	b    *backend
	seg  driver.Segment
	once sync.Once
}

// Register implements driver.Backend.
func (b *backend) Register(seg driver.Segment) (driver.Memory, error) {
	if b.closed.Load() {
		return nil, driver.ErrClosed
	}
	if err := b.callRules(context.Background(), Register, 0); err != nil {
		return nil, fmt.Errorf("register: %w", err)
	}
	inner, err := b.inner.Register(seg)
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

// Close implements driver.Memory. The key may be another's as soon as the wrapped one is
// closed.
func (m *memory) Close() error {
	m.once.Do(func() {
		m.b.mu.Lock()
		delete(m.b.locals, m.Key())
		m.b.mu.Unlock()
		m.forget()
	})
	return m.Memory.Close()
}

func (m *memory) forget() {
	known.Lock()
	defer known.Unlock()
	if known.segments[m.seg.Secret] == m {
		delete(known.segments, m.seg.Secret)
	}
}

// forgetLocals forgets the memories of a backend that is closed.
func (b *backend) forgetLocals() {
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

// mustTry reports whether a batch writes to memory of which nobody knows whether it is
// read-only: it is not to begin late, as it may have to be refused.
func (p *peer) mustTry(x *batch) bool {
	if x.op != driver.Write {
		return false
	}
	p.b.mu.Lock()
	defer p.b.mu.Unlock()
	if x.pages != nil {
		return !p.imports[x.pages.RemoteKey].tried
	}
	for i := range x.descs {
		if !p.imports[x.descs[i].RemoteKey].tried {
			return true
		}
	}
	return false
}

// tried notes that memory takes writes.
func (p *peer) tried(x *batch) {
	p.b.mu.Lock()
	defer p.b.mu.Unlock()
	note := func(key uint32) {
		if e, ok := p.imports[key]; ok {
			e.tried = true
			p.imports[key] = e
		}
	}
	if x.pages != nil {
		note(x.pages.RemoteKey)
	}
	for i := range x.descs {
		note(x.descs[i].RemoteKey)
	}
}

// check refuses at once what the wrapped backend would refuse later.
func (p *peer) check(x *batch) error {
	b := p.b
	switch {
	case x.op != driver.Read && x.op != driver.Write:
		return fmt.Errorf("%v: %w", x.op, driver.ErrNotSupported)
	case x.letter == message && len(x.msg) > b.caps.MessageMax:
		return fmt.Errorf("notification of %d bytes, at most %d: %w", len(x.msg), b.caps.MessageMax, driver.ErrBounds)
	case x.letter == count && x.counter >= driver.CountersMax:
		return driver.ErrBounds
	}
	if w := p.parts.watcher; w != nil {
		select {
		case <-w.Lost():
			return driver.ErrPeerLost
		default:
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if x.pages != nil {
		local, remote, err := p.extents(x.op, x.pages.LocalKey, x.pages.RemoteKey)
		if err != nil {
			return err
		}
		return x.pages.Check(local.size, remote.size)
	}
	for i := range x.descs {
		d := &x.descs[i]
		local, remote, err := p.extents(x.op, d.LocalKey, d.RemoteKey)
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

// Fence is driver.Fencer's.
func (f fencer) Fence(ctx context.Context, key uint32) error {
	switch err := f.b.callRules(ctx, Fence, 0); {
	case err == errSkipped:
		return nil
	case err != nil:
		return fmt.Errorf("fence: %w", err)
	}
	return f.b.parts.fencer.Fence(ctx, key)
}

// Alloc is driver.Allocator's.
func (a allocator) Alloc(n uint64) (driver.Segment, io.Closer, error) {
	return a.b.parts.allocator.Alloc(n)
}

// Count is driver.Counting's.
func (c counting) Count(number uint32) uint64 { return c.b.parts.counting.Count(number) }

// AwaitCount is driver.Counting's.
func (c counting) AwaitCount(number uint32, n uint64) bool {
	return c.b.parts.counting.AwaitCount(number, n)
}

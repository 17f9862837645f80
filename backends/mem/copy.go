// SPDX-License-Identifier: Apache-2.0

package mem

import (
	"fmt"
	"sync/atomic"

	hostcopy "github.com/sluicehq/sluice/csrc/copy"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// view is the pair of memories that a descriptor names. Consecutive descriptors usually name the
// same two, so they are looked up only when the keys change.
type view struct {
	localKey, remoteKey uint32
	local               *memory
	remote              *memory
}

// isOf reports whether a descriptor names these two memories.
func (v *view) isOf(d *driver.Desc) bool {
	return v.localKey == d.LocalKey && v.remoteKey == d.RemoteKey
}

// check returns an error if a descriptor leaves one of the memories, or the ranges that peers may
// reach.
func (v *view) check(d *driver.Desc) error {
	if at := 0; !v.remote.seg.Only.Has(d.Remote, d.Len, &at) {
		return driver.ErrBounds
	}
	return d.Check(uint64(len(v.local.seg.Mem)), v.remote.seg.Len)
}

// view looks up the memories of a pair of keys.
func (p *peer) view(op driver.Op, localKey, remoteKey uint32) (view, error) {
	local := p.from.memories.At(localKey)
	if local == nil {
		return view{}, fmt.Errorf("local key %d: %w", localKey, driver.ErrBounds)
	}
	p.mu.RLock()
	defer p.mu.RUnlock()
	remote := p.imports.At(remoteKey)
	if remote == nil {
		return view{}, fmt.Errorf("remote key %d: %w", remoteKey, driver.ErrBounds)
	}
	if op == driver.Write && remote.seg.ReadOnly {
		return view{}, driver.ErrReadOnly
	}
	return view{localKey, remoteKey, local, remote}, nil
}

// cursor walks through the contiguous runs of a batch, in order.
type cursor struct {
	descs   []driver.Desc
	pattern driver.Pattern // Count is 0 where there is none

	i   int                     // index of the present descriptor, or entry of the pattern
	run driver.Desc             // the rest of its present run, to be copied; Len 0: none
	at  [driver.LoopsMax]uint32 // counters of the pattern's loops
	way hostcopy.Way            // how to copy a transfer of so many bytes
}

// newCursor returns a cursor at the start of a batch of so many bytes.
func newCursor(b *driver.Batch, bytes uint64) cursor {
	c := cursor{descs: b.Descs, way: hostcopy.For(max(bytes, b.Total))}
	if b.Pattern != nil {
		c.pattern = *b.Pattern
	}
	c.load()
	return c
}

// load sets run to the first run of descriptor or entry i.
func (c *cursor) load() {
	switch {
	case c.i < c.pattern.Count:
		c.run = c.pattern.Desc(c.i)
	case c.i < len(c.descs):
		c.run = c.descs[c.i]
	default:
		c.run = driver.Desc{}
	}
}

// next moves to the following run.
func (c *cursor) next() {
	loops := c.pattern.Loops
	for l := len(loops) - 1; l >= 0; l-- {
		if c.at[l]++; c.at[l] < loops[l].N {
			c.run = c.nested()
			return
		}
		c.at[l] = 0
	}
	c.i++
	c.load()
}

// nested returns the run at the present counters of the pattern's loops.
func (c *cursor) nested() driver.Desc {
	d := c.pattern.Desc(c.i)
	for l, loop := range c.pattern.Loops {
		d.Local += uint64(c.at[l]) * loop.Local
		d.Remote += uint64(c.at[l]) * loop.Remote
	}
	return d
}

// advance skips n bytes of the present run.
func (c *cursor) advance(n uint64) {
	c.run.Local, c.run.Remote, c.run.Len = c.run.Local+n, c.run.Remote+n, c.run.Len-n
	if c.run.Len == 0 {
		c.next()
	}
}

// copyAll copies a batch that Submit has checked. It holds a gate for at most pieceMax bytes at a
// time. views are the batch's, in the order in which the cursor comes to them.
func copyAll(op driver.Op, c *cursor, views []view, cancel *atomic.Pointer[error]) error {
	for c.run.Len > 0 {
		if cancel != nil {
			if why := cancel.Load(); why != nil {
				return *why
			}
		}
		if !views[0].isOf(&c.run) {
			views = views[1:]
		}
		piece := c.i
		if err := views[0].copyPiece(op, c); err != nil {
			return &driver.PieceError{Piece: piece, Err: err}
		}
	}
	return nil
}

// copyPiece copies up to pieceMax bytes under the gate of the remote memory.
func (v *view) copyPiece(op driver.Op, c *cursor) (err error) {
	m := v.remote
	if m.revoked.Load() { // before the gate, so as not to compete with Revoke for it
		return driver.ErrRevoked
	}
	m.gate.RLock()
	defer m.gate.RUnlock()
	if m.revoked.Load() {
		return driver.ErrRevoked
	}
	into := v.local
	if op == driver.Write {
		into = m
	}
	if s := into.seg.Shared; s != nil {
		s.Enter()
		defer s.Leave()
	}
	defer hostmem.CatchFault(&err, hostmem.PanicOnFault())
	switch {
	case c.pattern.Count == 0:
		v.copyDescs(op, c)
		return nil
	case c.pattern.Run <= pieceMax && c.pattern.Plain() && m.seg.Only == nil:
		return v.copyPlain(op, c)
	}
	for room := uint64(pieceMax); room > 0 && c.run.Len > 0; {
		if err := v.check(&c.run); err != nil {
			return err // an index list has changed since Submit checked it
		}
		n := min(c.run.Len, room)
		local := v.local.seg.Mem[c.run.Local:][:n]
		remote := m.seg.Mem[c.run.Remote:][:n]
		if op == driver.Write {
			c.way.Copy(remote, local)
		} else {
			c.way.Copy(local, remote)
		}
		room -= n
		c.advance(n)
	}
	return nil
}

// copyDescs copies up to pieceMax bytes of descriptors that name the view's memories.
func (v *view) copyDescs(op driver.Op, c *cursor) {
	mine, theirs, left := v.local.seg.Mem, v.remote.seg.Mem, c.run.Len
	for room := uint64(pieceMax); room > 0 && c.i < len(c.descs); {
		d := &c.descs[c.i]
		if !v.isOf(d) {
			break
		}
		n, done := min(left, room), d.Len-left
		local, remote := mine[d.Local+done:][:n], theirs[d.Remote+done:][:n]
		if op == driver.Write {
			c.way.Copy(remote, local)
		} else {
			c.way.Copy(local, remote)
		}
		room -= n
		if left -= n; left > 0 {
			break // no room is left
		}
		if c.i++; c.i < len(c.descs) {
			left = c.descs[c.i].Len
		}
	}
	if c.load(); c.run.Len > 0 {
		c.advance(c.run.Len - left)
	}
}

// copyPlain copies up to pieceMax bytes of entries of one run each.
func (v *view) copyPlain(op driver.Op, c *cursor) error {
	p, mine, theirs := &c.pattern, v.local.seg.Mem, v.remote.seg.Mem
	for room := uint64(pieceMax); room >= p.Run && c.i < p.Count; room -= p.Run {
		l, r := p.Local.At(c.i), p.Remote.At(c.i)
		if l > uint64(len(mine))-p.Run || r > uint64(len(theirs))-p.Run {
			return driver.ErrBounds // an index list has changed since Submit checked it
		}
		if op == driver.Write {
			c.way.Copy(theirs[r:][:p.Run], mine[l:][:p.Run])
		} else {
			c.way.Copy(mine[l:][:p.Run], theirs[r:][:p.Run])
		}
		c.i++
	}
	c.load()
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/handoff"
	"github.com/sluicehq/sluice/kv/pool"
	"github.com/sluicehq/sluice/kv/store"
)

// spill writes blocks of a request to the file, at most a batch. The plain writes of the same
// bytes come before it and after it in turn, and go to a file of their own.
//
// Preconditions: mu is held.
func (t *tier) spill(ctx context.Context, q *handoff.Request, at []int) error {
	evicted := t.res.Evicted
	places := t.makeRoom(len(at))
	if evicted == t.res.Evicted && t.res.Attached == 0 {
		if err := t.base.freshen(); err != nil {
			return err
		}
	}
	if err := t.store.Begin(places...); err != nil {
		return err
	}
	pieces := make([][]byte, len(at))
	move, stride := t.moves[0], t.store.Geometry().Stride()
	for k, i := range at {
		r, err := t.checker.geometry.Block(uint64(q.Blocks[i]))
		if err == nil {
			err = move.Add(t.blocks, r.Off, t.disk, uint64(places[k])*stride, r.Len)
		}
		if err != nil {
			return err
		}
		pieces[k] = t.checker.memory[r.Off : r.Off+r.Len : r.Off+r.Len]
	}
	if err := t.beside(ctx, &t.res.Spilled, move, func() (uint64, error) {
		return t.base.write(pieces)
	}); err != nil {
		return err
	}
	for k, i := range at {
		h := q.Hashes[i]
		if _, err := t.store.Commit(places[k], store.Name(h), uint64(len(pieces[k])),
			store.Sum(pieces[k])); err != nil {
			return err
		}
		t.where[h] = places[k]
	}
	t.told(&t.res.Spilled, pieces)
	return nil
}

func (t *tier) told(m *moved, pieces [][]byte) {
	m.Blocks += uint64(len(pieces))
	for _, p := range pieces {
		m.Bytes += uint64(len(p))
	}
	t.said(len(pieces))
}

// makeRoom chooses the places that are written next, and forgets what they hold.
func (t *tier) makeRoom(n int) []uint32 {
	places := make([]uint32, n)
	for k := range places {
		i := t.next
		t.next = uint32((uint64(i) + 1) % t.offload.Blocks)
		if b, ok := t.store.Block(i); ok {
			delete(t.where, pool.Hash(b.Name))
			t.res.Evicted++
		}
		places[k] = i
	}
	return places
}

// beside runs a transfer and, before it or behind it in turn, plain system calls.
func (t *tier) beside(ctx context.Context, m *moved, move *engine.Transfer,
	plain func() (uint64, error)) error {
	first := t.base.turn()
	for _, ours := range []bool{first, !first} {
		start := time.Now()
		if !ours {
			n, err := plain()
			if err != nil {
				return err
			}
			m.Base, m.BaseBytes = m.Base+time.Since(start), m.BaseBytes+n
			continue
		}
		err := move.Post()
		if err == nil {
			err = move.Wait(ctx)
		}
		if err != nil {
			return err
		}
		m.Took += time.Since(start)
	}
	return move.Reset()
}

// readBack reads blocks of the file into the memory for it, and checks every layer.
//
// Preconditions: mu is held, or no other goroutine has the tier yet.
func (t *tier) readBack(ctx context.Context, places []uint32) error {
	for n := t.batch(); len(places) > 0; {
		part := places[:min(n, len(places))]
		places = places[len(part):]
		if err := t.readBatch(ctx, part); err != nil {
			return fmt.Errorf("offload: %w", err)
		}
	}
	return nil
}

func (t *tier) readBatch(ctx context.Context, places []uint32) error {
	g := t.store.Geometry()
	move, stride := t.moves[1], g.Stride()
	pieces := make([][]byte, len(places))
	for k, i := range places {
		off := uint64(k) * stride
		if err := move.Add(t.recall, off, t.disk, uint64(i)*stride, g.BlockBytes); err != nil {
			return err
		}
		pieces[k] = t.memory.Bytes()[off : off+g.BlockBytes : off+g.BlockBytes]
		fill(pieces[k], decodePoison) // what does not come must show
	}
	if err := t.beside(ctx, &t.res.Recalled, move, func() (uint64, error) {
		return t.base.read(places)
	}); err != nil {
		return err
	}
	for k, i := range places {
		t.check(i, pieces[k])
	}
	t.told(&t.res.Recalled, pieces)
	return nil
}

// check compares a block with its record, and each of its layers with what its name says.
func (t *tier) check(i uint32, bytes []byte) {
	b, ok := t.store.Block(i)
	c := t.checker
	c.mu.Lock()
	defer c.mu.Unlock()
	start := time.Now()
	defer func() { c.took += time.Since(start) }()
	if !ok {
		c.mismatch("%s: block %d holds nothing, and was written", t.path, i)
		return
	}
	if err := b.Verify(bytes); err != nil {
		c.mismatch("%s: block %d, at byte %d: %v", t.path, i, t.at(i), err)
	}
	id, layer := idOf(pool.Hash(b.Name)), c.geometry.LayerBytes()
	for l := range c.geometry.Layers() {
		part := bytes[uint64(l)*layer:][:layer]
		if n := c.wrong(part, id, l); n > 0 {
			c.mismatch("%s: block %d (hash %d), layer %d at byte %d: %d of %d bytes differ",
				t.path, i, id, l, t.at(i)+uint64(l)*layer, n, len(part))
		}
	}
}

// at is where in the file a block begins.
func (t *tier) at(i uint32) uint64 {
	return t.store.Segment().FileOff + uint64(i)*t.store.Geometry().Stride()
}

// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"fmt"
	"slices"
)

// Grant holds the blocks of one request.
type Grant struct {
	// Blocks are the block numbers, one for each hash that was asked for, in
	// that order. They are the holder's until Release.
	Blocks []uint32
	// Missing are the indices in Blocks whose content is to be made, ascending.
	// The others hold theirs already, and must not be written to.
	Missing []int

	pool     *Pool
	hashes   []Hash
	released bool
}

// TryAcquire takes a block for each hash: those that are known, and room for
// the others. It takes all or none. ErrFull means that there is not enough room
// now, or that another caller waits for room already; ErrTooLarge that there never is.
func (p *Pool) TryAcquire(hashes []Hash) (*Grant, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.check(len(hashes)); err != nil {
		return nil, err
	}
	if p.waiting.Len() == 0 {
		if g := p.grant(hashes); g != nil {
			return g, nil
		}
	}
	return nil, fmt.Errorf("%d blocks, %d in use, %d requests waiting: %w", len(p.blocks), p.used,
		p.waiting.Len(), ErrFull)
}

// Publish says that the block at an index of Blocks has its content, so that
// other requests may share it. It stays private where the hash is private, or
// where another block with the same content was published before.
func (g *Grant) Publish(index int) {
	p := g.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if g.released || index < 0 || index >= len(g.Blocks) {
		return
	}
	h := g.hashes[index]
	i := g.Blocks[index]
	if _, known := p.known[h]; known || h.Private() || p.blocks[i].retired {
		return
	}
	p.known[h] = i
	p.blocks[i].hash, p.blocks[i].published = h, true
}

// Retire says that the block at an index of Missing must not be used again until proof is closed:
// a peer may still write to it. It is private from then on, and lost to the pool on Release until
// then; the pool waits for the proof itself, until Close. It does nothing to a published block, nor
// where the proof is there already.
func (g *Grant) Retire(index int, proof <-chan struct{}) {
	select {
	case <-proof:
		return
	default:
	}
	p := g.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if g.released || !slices.Contains(g.Missing, index) {
		return
	}
	i := g.Blocks[index]
	b := &p.blocks[i]
	if b.published || b.retired {
		return
	}
	b.retired = true
	p.retiring++
	p.serve() // some may ask for more than is left now
	go func() {
		select {
		case <-proof:
			p.restore(i)
		case <-p.closing:
		}
	}()
}

// restore has a retired block used again.
func (p *Pool) restore(i uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := &p.blocks[i]
	b.retired = false
	if b.refs > 0 {
		p.retiring--
		return
	}
	p.retired--
	p.free.pushBack(p.blocks, i)
	p.serve()
}

// Release gives the blocks back. Those that no other caller holds become cached
// where they are published and free where not. It is idempotent.
func (g *Grant) Release() {
	p := g.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if g.released {
		return
	}
	g.released = true
	// From the end: a prefix is worth more than what follows it, and should be
	// evicted later.
	for _, i := range slices.Backward(g.Blocks) {
		p.unhold(i)
	}
	p.serve()
}

// grant takes the blocks if there is room for them, and returns nil if not.
func (p *Pool) grant(hashes []Hash) *Grant {
	missing := 0
	for _, h := range hashes {
		if _, known := p.known[h]; !known {
			missing++
		}
	}
	if missing > p.free.n+p.cached.n {
		return nil
	}
	g := &Grant{pool: p, hashes: slices.Clone(hashes), Blocks: make([]uint32, len(hashes)),
		Missing: make([]int, 0, missing)}
	for at, h := range hashes {
		if i, known := p.known[h]; known {
			g.Blocks[at] = i
			p.hold(i)
		} else {
			g.Missing = append(g.Missing, at)
		}
	}
	// What is held now cannot be evicted any more, so that the room is known.
	if missing > p.free.n+p.cached.n {
		g.rollback()
		return nil
	}
	for _, at := range g.Missing {
		g.Blocks[at] = p.room()
		p.hold(g.Blocks[at])
	}
	p.count.Hits += uint64(len(hashes) - missing)
	p.count.Misses += uint64(missing)
	return g
}

// rollback gives back what grant had found by its hash.
func (g *Grant) rollback() {
	missing := g.Missing
	for at := len(g.Blocks) - 1; at >= 0; at-- {
		if n := len(missing); n > 0 && missing[n-1] == at {
			missing = missing[:n-1]
			continue
		}
		g.pool.unhold(g.Blocks[at])
	}
}

// room returns a free block, evicting the oldest cached one if need be.
// Precondition: there is one or the other.
func (p *Pool) room() uint32 {
	if p.free.n == 0 {
		i := p.cached.first
		p.cached.remove(p.blocks, i)
		delete(p.known, p.blocks[i].hash)
		p.blocks[i].hash, p.blocks[i].published = Hash{}, false
		p.free.pushBack(p.blocks, i)
		p.count.Evictions++
	}
	return p.free.last
}

func (p *Pool) hold(i uint32) {
	b := &p.blocks[i]
	if b.refs == 0 {
		if b.published {
			p.cached.remove(p.blocks, i)
		} else {
			p.free.remove(p.blocks, i)
		}
		p.used++
	}
	b.refs++
}

func (p *Pool) unhold(i uint32) {
	b := &p.blocks[i]
	b.refs--
	if b.refs > 0 {
		return
	}
	p.used--
	switch {
	case b.retired:
		p.retired++
		p.retiring--
	case b.published:
		p.cached.pushBack(p.blocks, i)
	default:
		p.free.pushBack(p.blocks, i)
	}
}

// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"fmt"

	"github.com/sluicehq/sluice/engine"
)

// Order is the order in which a policy lets blocks go, without their bytes: what simulations need
// of a cache with one namespace, one shard and blocks of one length. An Order is not safe for
// concurrent use.
type Order struct {
	blocks queues
	index  *index // entries alone; at finds them
	at     map[Key]uint32
	room   int
}

// NewOrder returns the order of a cache with room for so many blocks, which has none yet.
func NewOrder(p Policy, room int) (*Order, error) {
	if err := p.check(); err != nil {
		return nil, fmt.Errorf("order: %w: %w", err, engine.ErrBounds)
	}
	if err := bounded("room", room, 1, entriesMax); err != nil {
		return nil, fmt.Errorf("order: %w: %w", err, engine.ErrBounds)
	}
	x := &index{memory: &memory{}}
	return &Order{blocks: p.make(links{x, Memory}), index: x, at: map[Key]uint32{},
		room: room}, nil
}

// Use counts a use of a block. It reports whether the block is there.
func (o *Order) Use(key Key) bool {
	i, ok := o.at[key]
	if ok {
		o.blocks.touch(i)
	}
	return ok
}

// Add stores a block. Where that needs room, it returns the block that went for it.
func (o *Order) Add(key Key) (gone Key, went bool) {
	if o.Use(key) {
		return gone, false
	}
	m, i := o.index.memory, uint32(len(o.at))
	if went = len(o.at) == o.room; went {
		i = o.blocks.victim(func(uint32) bool { return false })
		gone = m.entries[i].key
		delete(o.at, gone)
	} else {
		m.entries = append(m.entries, entry{})
	}
	m.entries[i] = entry{key: key, slot: none, record: none}
	o.at[key] = i
	o.blocks.insert(i)
	return gone, went
}

// SPDX-License-Identifier: Apache-2.0

package pool

// none ends a chain; a pool has at most 1<<31 blocks.
const none = 1<<32 - 1

// chain is a doubly linked list through the blocks, so that moving a block from
// one to another allocates nothing.
type chain struct {
	first, last uint32
	n           int
}

func (c *chain) init() { c.first, c.last, c.n = none, none, 0 }

func (c *chain) pushBack(blocks []block, i uint32) {
	blocks[i].prev, blocks[i].next = c.last, none
	if c.last == none {
		c.first = i
	} else {
		blocks[c.last].next = i
	}
	c.last = i
	c.n++
}

func (c *chain) remove(blocks []block, i uint32) {
	prev, next := blocks[i].prev, blocks[i].next
	if prev == none {
		c.first = next
	} else {
		blocks[prev].next = next
	}
	if next == none {
		c.last = prev
	} else {
		blocks[next].prev = prev
	}
	c.n--
}

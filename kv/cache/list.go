// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"cmp"
	"slices"
	"time"
)

// SpaceInfo is a namespace that a cache knows.
type SpaceInfo struct {
	Name     string // "": a disk knows its digest, and no process has opened it since
	Digest   [16]byte
	Priority int
	Quota    [2]uint64 // by tier; 0: none
	Flow     Flow
	TTL      time.Duration // 0: none
	NamespaceStats
}

// Spaces lists the namespaces, at most 1,024, by name.
func (c *Cache) Spaces() (list []SpaceInfo) {
	if !c.enter() {
		return nil
	}
	defer c.exit()
	c.spaces.mu.Lock()
	defer c.spaces.mu.Unlock()
	for k := range c.spaces.list {
		s := &c.spaces.list[k]
		if !s.known {
			continue
		}
		l := c.spaces.at(int(s.lane.Load()))
		i := SpaceInfo{Name: s.name, Digest: s.digest, Priority: int(l.priority.Load()),
			Flow: s.flow(), TTL: time.Duration(s.ttl.Load()) * time.Second}
		for t := range tiers {
			i.Quota[t] = l.quota[t].Load()
			i.Blocks[t], i.Bytes[t] = s.blocks[t].Load(), s.bytes[t].Load()
		}
		list = append(list, i)
	}
	slices.SortFunc(list, func(a, b SpaceInfo) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), slices.Compare(a.Digest[:], b.Digest[:]))
	})
	return list
}

// Space returns a namespace that the cache knows, by its digest; nil: it knows none.
func (c *Cache) Space(digest [16]byte) *Namespace {
	if !c.enter() {
		return nil
	}
	defer c.exit()
	c.spaces.mu.Lock()
	defer c.spaces.mu.Unlock()
	for k := range c.spaces.list {
		if s := &c.spaces.list[k]; s.known && s.digest == digest {
			return c.open(k)
		}
	}
	return nil
}

// BlockInfo is a block that a cache has.
type BlockInfo struct {
	Key   Key
	Bytes uint32
	Found Found
}

// listStep is how many entries Blocks looks at under one lock, and listMax in one call.
const (
	listStep = 1 << 10
	listMax  = 256 << 10
)

// Blocks lists blocks of a namespace in no order. The first call has from 0, the next one what the
// one before returned, until that is 0. A call looks at a bounded part of the cache, and may find
// nothing there; it lists what is there as it looks.
func (n *Namespace) Blocks(from uint32, dst []BlockInfo) (count int, next uint32) {
	if !n.c.enter() {
		return 0, 0
	}
	defer n.c.exit()
	x := n.c.index
	all := uint32(len(x.shards)) * x.shards[0].n
	end := min(all, from+min(all-min(from, all), listMax))
	for from < end && count < len(dst) {
		s := x.shardFor(from)
		stop := min(from+listStep, s.first+s.n, end)
		s.mu.Lock()
		for ; from < stop && count < len(dst); from++ {
			if e := x.entry(from); e.space == n.id && n.c.found(from).There() {
				dst[count] = BlockInfo{e.key, e.size, n.c.found(from)}
				count++
			}
		}
		s.mu.Unlock()
	}
	if from >= all {
		return count, 0
	}
	return count, from
}

// Block tells of one block; Found is Nowhere where the cache does not have it.
func (n *Namespace) Block(key Key) BlockInfo {
	b := BlockInfo{Key: key}
	if !n.c.enter() {
		return b
	}
	defer n.c.exit()
	n.c.index.each(n.id, []Key{key}, false, func(_ *shard, _ int, i uint32, _ uint64) {
		if i != none {
			e := n.c.index.entry(i)
			b.Bytes, b.Found = e.size, n.c.found(i)
		}
	})
	return b
}

// found says where the block of an entry is. The caller holds the shard's lock.
func (c *Cache) found(i uint32) (f Found) {
	switch e := c.index.entry(i); {
	case e.state == filling:
		return Coming
	case e.state == present && !c.expired(i):
		if e.slot != none {
			f |= InMemory
		}
		if e.record != none {
			f |= OnDisk
		}
	}
	return f
}

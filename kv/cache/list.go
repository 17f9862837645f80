// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"cmp"
	"fmt"
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
		i := SpaceInfo{Name: s.name(), Digest: s.digest, Priority: int(l.priority.Load()),
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

// Blocks lists blocks of a namespace in no order. The first call has from 0, the next one what the
// one before returned, until that is 0. A call looks at a bounded part of the cache, and may find
// nothing there; it lists what is there as it looks.
func (n *Namespace) Blocks(from uint32, dst []BlockInfo) (count int, next uint32) {
	if !n.c.enter() {
		return 0, 0
	}
	defer n.c.exit()
	n.c.walk(&from, func(_ *shard, i uint32) bool {
		e := n.c.index.entry(i)
		f := n.c.found(i)
		if e.space != n.id || !f.There() {
			return true
		}
		if count == len(dst) {
			return false
		}
		dst[count] = BlockInfo{e.key, e.size, f}
		count++
		return true
	})
	if from >= uint32(len(n.c.index.memory.entries)) {
		return count, 0
	}
	return count, from
}

// Explain tells of one block, also in words: where it is and what keeps it there. Found is Nowhere
// where the cache does not have it.
func (n *Namespace) Explain(key Key) (b BlockInfo, text string) {
	b, text = BlockInfo{Key: key}, "the cache does not know it"
	c := n.c
	if !c.enter() {
		return b, "the cache is closed"
	}
	defer c.exit()
	c.index.each(n.id, []Key{key}, false, func(_ *shard, _ int, i uint32, _ uint64) {
		if i == none {
			return
		}
		e := c.index.entry(i)
		b.Bytes, b.Found = e.size, c.found(i)
		text = fmt.Sprintf("%d bytes, CRC-32C %08x", e.size, e.crc)
		if e.slot != none {
			text += fmt.Sprintf(", in memory at %d", uint64(e.slot)*granule)
		}
		if e.record != none {
			d := c.disks[e.disk]
			text += fmt.Sprintf(", on disk %s at %d", d.cfg.Path,
				uint64(d.placeOf(e.record))*granule)
		}
		text += [...]string{"", ", its bytes come", "", ", it goes with its last use"}[e.state]
		text += fmt.Sprintf("; %d uses under way", e.pins)
	})
	if !b.Found.There() && b.Found != Coming {
		for _, f := range c.findBelow(n.id, []Key{key}) {
			if f.Size > 0 {
				b.Bytes, b.Found = f.Size, InObject
				text = fmt.Sprintf("%d bytes, CRC-32C %08x, in the tier below", f.Size, f.CRC)
			}
		}
	}
	return b, fmt.Sprintf("%x in %s: %s", key, n.name, text)
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

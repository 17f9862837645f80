// SPDX-License-Identifier: Apache-2.0

package member

import (
	"bytes"
	"math"
	"slices"

	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
	"github.com/sluicehq/sluice/kv/cluster/placement"
)

// segment is what this node has of a segment of chains, as far as clients have told.
type segment struct {
	first   int    // place in its chain of its first block
	reads   uint64 // blocks that were read, halved at each survey
	grown   bool   // a client has stored some since it was sent, or it was not
	lacking bool   // to a further owner
	parts   []*part
}

// partMax bounds the blocks of a part: where very many chains part within a segment it has several.
const partMax = 1 << 12

// part is what it has in one namespace, of blocks of one length.
type part struct {
	of     *serve.SpaceName
	bytes  uint64  // of a block
	blocks []block // by key; where chains part within the segment those of all
}

type block struct {
	key placement.Key
	at  uint16 // place in the segment
}

func (p *part) keys() []cache.Key {
	keys := make([]cache.Key, len(p.blocks))
	for k, b := range p.blocks {
		keys[k] = b.key
	}
	return keys
}

// blocksMax bounds what a Member knows: more than the cache can, so that few are gone.
func (m *Member) blocksMax() int { return m.cfg.Cache.Attached().Room/4*5 + 1<<10 }

// count takes in what a client has used.
func (m *Member) count(u *serve.Use) {
	m.keys.Add(-int64(len(u.Keys)))
	keys, outcomes := u.Keys, u.Outcomes
	for _, run := range u.Segments {
		n := int(run.Blocks)
		m.countRun(u, run, keys[:n], outcomes[:n])
		keys, outcomes = keys[n:], outcomes[n:]
	}
}

func (m *Member) countRun(u *serve.Use, run serve.Segment, keys []cache.Key,
	outcomes []cache.Outcome) {
	done := 0
	for _, o := range outcomes {
		if o == cache.Done {
			done++
		}
	}
	if done == 0 && !slices.Contains(outcomes, cache.Known) {
		return
	}
	s := m.segments[run.Head]
	if s == nil {
		_, first := placement.SegmentOf(int(run.First))
		s = &segment{first: first}
		m.segments[run.Head] = s
	}
	if !u.Store && done > 0 {
		m.heat.Read(run.Head, done)
		s.reads += uint64(done)
	}
	s.grown = s.grown || u.Store && !u.Copy && done > 0
	for k, key := range keys {
		if outcomes[k] != cache.Done && outcomes[k] != cache.Known {
			continue
		}
		if p, to, is := s.find(u, key); !is {
			at := min(int(run.First)+k-s.first, math.MaxUint16)
			p.blocks = slices.Insert(p.blocks, to, block{key, uint16(max(at, 0))})
			m.blocks++
		}
	}
}

// find returns the part that has a block, or is to have it, and its place there.
func (s *segment) find(u *serve.Use, key cache.Key) (in *part, to int, is bool) {
	for _, p := range s.parts {
		if p.of.Digest != u.Space.Digest || p.bytes != u.Bytes {
			continue
		}
		at, is := slices.BinarySearchFunc(p.blocks, key, func(b block, key cache.Key) int {
			return bytes.Compare(b.key[:], key[:])
		})
		if is {
			return p, at, true
		}
		if len(p.blocks) < partMax {
			in, to = p, at
		}
	}
	if in == nil {
		in = &part{of: u.Space, bytes: u.Bytes}
		s.parts = append(s.parts, in)
	}
	return in, to, false
}

// held is a segment as placement takes it.
func (m *Member) held(head placement.Key) placement.Held {
	s := m.segments[head]
	h := placement.Held{Segment: head, First: s.first, Heat: s.reads, Owners: m.owners(head)}
	for _, p := range s.parts {
		h.Bytes += int64(p.bytes) * int64(len(p.blocks))
		h.Owners = max(h.Owners, m.copies(p.of.Name))
	}
	return h
}

// check forgets those blocks of a part that the cache has no more. It opens the namespace, which
// the caller closes; nil: the cache does not know it.
func (m *Member) check(p *part, opened map[[16]byte]*cache.Namespace) {
	ns, is := opened[p.of.Digest]
	if !is {
		ns = m.cfg.Cache.Space(p.of.Digest)
		opened[p.of.Digest] = ns
	}
	before := len(p.blocks)
	if ns == nil {
		p.blocks = nil
	} else {
		found, k := ns.Match(p.keys()).Blocks, -1
		p.blocks = slices.DeleteFunc(p.blocks, func(block) bool {
			k++
			return !found[k].There()
		})
	}
	m.blocks -= before - len(p.blocks)
}

// forget forgets a segment, until a client uses it again.
func (m *Member) forget(head placement.Key) {
	for _, p := range m.segments[head].parts {
		m.blocks -= len(p.blocks)
	}
	delete(m.segments, head)
}

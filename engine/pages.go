// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// Pages is the plain form of a Pattern: Count scattered entries of one length, each one
// run of bytes. Entry i lies at Base + index[i]*Stride on each side. A nil index list
// counts up from 0.
type Pages struct {
	Count                     int    // entries; the length of each list that is not nil
	EntryLen                  uint64 // bytes
	LocalBase, RemoteBase     uint64 // bytes
	LocalStride, RemoteStride uint64 // bytes; at least EntryLen, unless all entries are one
	Local, Remote             []uint32
}

// Pattern returns the same entries as a Pattern.
func (p *Pages) Pattern() Pattern {
	return Pattern{Run: p.EntryLen, Count: p.Count,
		Local:  Side{Base: p.LocalBase, Stride: p.LocalStride, List: p.Local},
		Remote: Side{Base: p.RemoteBase, Stride: p.RemoteStride, List: p.Remote}}
}

// Bytes returns the sum of all entries.
func (p *Pages) Bytes() uint64 { return uint64(p.Count) * p.EntryLen }

// AddPages is AddPattern for entries of one run each.
func (t *Transfer) AddPages(local *Region, remote *Remote, p Pages) error {
	return t.AddPattern(local, remote, p.Pattern())
}

// AddPattern lists a pattern of scattered entries. The keys of p are ignored. Its index
// lists and loops are kept by reference and must not change until the transfer is done for
// the last time or Reset. A backend that does not take such a pattern gets its runs one by one.
func (t *Transfer) AddPattern(local *Region, remote *Remote, p Pattern) error {
	g, localKey, remoteKey, err := t.join(local, remote)
	if err != nil {
		return err
	}
	p.LocalKey, p.RemoteKey = localKey, remoteKey
	if err := p.Check(local.seg.Len, remote.size); err != nil {
		return &OpError{Op: "add " + remote.name + " to " + local.name, Err: err}
	}
	if remote.only != nil {
		t.keep(&p)
		if !remote.only.HasRemote(&p) {
			return &OpError{Op: "add " + remote.name + " to " + local.name, Err: errBeside}
		}
	}
	t.dirty = true
	if !g.conn.takes(&p) {
		g.expand(&p)
		return nil
	}
	g.bytes += p.Bytes()
	for most := g.conn.entriesMax(&p); p.Count > most; {
		g.patterns = append(g.patterns, cutPattern(&p, most))
	}
	g.patterns = append(g.patterns, p)
	return nil
}

// errBeside is for bytes of a Remote that its lease does not name.
var errBeside = fmt.Errorf("the lease is for other ranges, ask its owner for one of these: %w",
	ErrBounds)

// keep gives the pattern a list of the far side, and loops, that the program cannot change: where
// peers write by themselves, no later look keeps it within the ranges of its lease.
func (t *Transfer) keep(p *Pattern) {
	n := len(t.lists)
	t.lists = append(t.lists, p.Remote.List...)
	if p.Remote.List != nil {
		p.Remote.List = t.lists[n:len(t.lists):len(t.lists)]
	}
	n = len(t.loops)
	t.loops = append(t.loops, p.Loops...)
	p.Loops = t.loops[n:len(t.loops):len(t.loops)]
}

// takes reports whether the connection takes the pattern as one, or cut between entries. A chain
// takes none with loops: a slot's list has no room for them.
func (c *conn) takes(p *Pattern) bool {
	caps := &c.lane.caps
	if p.Runs() > caps.RunsMax || caps.LenMax > 0 && p.Run > caps.LenMax {
		return false
	}
	return c.can&driver.CanPattern != 0 && (p.Plain() || c.lane != c.lane.e.stager.lane)
}

// expand lists the runs of a pattern one by one.
func (g *group) expand(p *Pattern) {
	var runs []driver.Desc
	for i := range p.Count {
		runs = p.AppendDescs(runs[:0], i)
		for _, d := range runs {
			g.add(d, g.conn.lenMax())
		}
	}
}

// cutPattern takes the first n entries off p, which has more.
func cutPattern(p *Pattern, n int) Pattern {
	head := *p
	head.Count = n
	cutSide(&head.Local, &p.Local, n)
	cutSide(&head.Remote, &p.Remote, n)
	p.Count -= n
	return head
}

// cutSide cuts one side of a pattern after n entries. Both parts may need the slot in which
// the cut is.
func cutSide(head, rest *Side, n int) {
	per := max(1, int(rest.Per))
	end := int(rest.First) + n
	whole, in := end/per, end%per
	if rest.List == nil {
		rest.Base += uint64(whole) * rest.Stride
	} else {
		last := (end + per - 1) / per
		head.List, rest.List = rest.List[:last:last], rest.List[whole:]
	}
	rest.First = uint32(in)
}

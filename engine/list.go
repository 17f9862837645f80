// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"slices"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/wire"
)

// group is the part of a transfer's list that goes over one connection.
type group struct {
	conn     *conn
	descs    []driver.Desc
	patterns []Pattern
	bytes    uint64
}

func (g *group) clear() {
	g.conn, g.descs, g.bytes = nil, g.descs[:0], 0
	clear(g.patterns) // lets go of the caller's index lists
	g.patterns = g.patterns[:0]
}

// batch is one call of Submit.
type batch struct {
	driver.Batch
	conn  *conn
	bytes uint64 // of a transfer below SwapIn
	last  bool   // only after all before it have ended: it carries the notification
	part  bool   // of a notification that one message has no room for
}

// Add lists one contiguous copy of n bytes. Copies that continue the one listed
// before are merged with it.
func (t *Transfer) Add(local *Region, localOff uint64, remote *Remote, remoteOff, n uint64) error {
	g, localKey, remoteKey, err := t.join(local, remote)
	if err != nil {
		return err
	}
	d := driver.Desc{Local: localOff, Remote: remoteOff, Len: n, LocalKey: localKey,
		RemoteKey: remoteKey}
	if err := d.Check(local.seg.Len, remote.size); err != nil {
		return fmt.Errorf("add %s to %s: %w", remote.name, local.name, err)
	}
	if at := 0; !remote.only.Has(remoteOff, n, &at) {
		return fmt.Errorf("add %s to %s: [%d, +%d) of the peer's: %w", remote.name, local.name,
			remoteOff, n, errBeside)
	}
	g.add(d, t.lenMax(g.conn))
	t.listed(g.conn, local, remote)
	return nil
}

// listed notes that the list has one more entry. The first one decides the resource.
func (t *Transfer) listed(c *conn, local *Region, remote *Remote) {
	t.dirty = true
	if t.e.schedule != nil && t.resource == nil && t.class != unscheduled {
		t.resource = c.resourceOf(local, remote)
	}
}

func (g *group) add(d driver.Desc, lenMax uint64) {
	g.bytes += d.Len
	if n := len(g.descs); n > 0 {
		prev := &g.descs[n-1]
		if prev.LocalKey == d.LocalKey && prev.RemoteKey == d.RemoteKey &&
			prev.Local+prev.Len == d.Local && prev.Remote+prev.Len == d.Remote &&
			prev.Len+d.Len <= lenMax {
			prev.Len += d.Len
			return
		}
	}
	for d.Len > lenMax {
		piece := d
		piece.Len = lenMax
		g.descs = append(g.descs, piece)
		d.Local, d.Remote, d.Len = d.Local+lenMax, d.Remote+lenMax, d.Len-lenMax
	}
	g.descs = append(g.descs, d)
}

// Notify attaches a message that reaches the peer after the data is visible there. It is kept
// by reference until Reset, and sent as it is when Post is called. An empty message is one,
// too. It may have Peer.MessageMax bytes; what is too long for one message of the backend goes
// in parts.
func (t *Transfer) Notify(msg []byte) error {
	if !t.state().atRest() {
		return t.misuse("change")
	}
	t.attachFrame(append(append(t.frame[:0], wire.KindNotification), msg...))
	t.frame, t.text = t.message, msg
	return nil
}

// attachFrame adds a message that follows the data. Its first byte is its kind.
func (t *Transfer) attachFrame(b []byte) {
	t.message, t.text, t.notify, t.dirty = b, nil, true, true
}

// join finds or makes the group of the connection that serves a pair of memories, and keeps both
// from being closed, and the imported key from being given to other memory.
func (t *Transfer) join(local *Region, remote *Remote) (g *group, localKey, remoteKey uint32,
	err error) {
	switch {
	case !t.state().atRest():
		return nil, 0, 0, t.misuse("change")
	case local.e != t.e || remote.p != t.p: // and nothing of another peer's is ever in the list
		return nil, 0, 0, fmt.Errorf("add: region, remote and transfer belong to different "+
			"engines or peers: %w", ErrNoRoute)
	case t.op == Write && remote.readOnly:
		return nil, 0, 0, fmt.Errorf("add: region %s of peer %s may only be read: %w", remote.name,
			t.p.name, ErrReadOnly)
	}
	if !isListed(t.remotes, remote) {
		remote.mu.Lock()
		remote.users++
		remote.mu.Unlock()
		t.remotes = append(t.remotes, remote)
	}
	c, remoteKey, err := t.p.choose(local, remote, t.route, len(t.groups) == 0)
	if err != nil {
		return nil, 0, 0, err
	}
	if !isListed(t.regions, local) {
		if err := local.use(); err != nil {
			return nil, 0, 0, err
		}
		t.regions = append(t.regions, local)
	}
	localKey = local.mems[c.lane.index].Key()
	for i := range t.groups {
		if t.groups[i].conn == c {
			return &t.groups[i], localKey, remoteKey, nil
		}
	}
	if len(t.groups) < cap(t.groups) {
		t.groups = t.groups[:len(t.groups)+1] // with the memory of before
	} else {
		t.groups = append(t.groups, group{})
	}
	g = &t.groups[len(t.groups)-1]
	g.conn = c
	return g, localKey, remoteKey, nil
}

// isListed looks from the end: neighbours in a list mostly have the same memories.
func isListed[T comparable](list []T, v T) bool {
	for i := len(list) - 1; i >= 0; i-- {
		if list[i] == v {
			return true
		}
	}
	return false
}

// prepare cuts the list into batches, and gives the notification to the last. Where the list is as
// it was, it only copies the program's message again, which may have changed since the last post.
func (t *Transfer) prepare() error {
	if len(t.text) > 0 {
		copy(t.message[1:], t.text)
		for i, rest := 0, t.text; !t.dirty && len(t.parts) > 0 && i < len(t.batches); i++ {
			if b := &t.batches[i]; b.part {
				rest = rest[copy(b.Notify[wire.PartHead:], rest):]
			}
		}
	}
	if !t.dirty && len(t.batches) > 0 {
		return nil
	}

	clear(t.batches)
	t.batches, t.bytes = t.batches[:0], 0
	if t.extras != nil {
		t.extras.greets, t.extras.fragments = nil, nil
	}
	list := func(c *conn, b driver.Batch) {
		t.batches = append(t.batches, batch{Batch: b, conn: c})
		if t.grants != nil {
			t.batches[len(t.batches)-1].count()
		}
	}
	for i := range t.groups {
		g := &t.groups[i]
		t.bytes += g.bytes
		for rest := g.descs; len(rest) > 0; {
			n := g.conn.nextBatch(rest, t.batchMax())
			list(g.conn, driver.Batch{Op: t.op, Durable: t.route.Durable, Descs: rest[:n:n],
				Total: g.bytes})
			rest = rest[n:]
		}
		for j := range g.patterns {
			list(g.conn, driver.Batch{Op: t.op, Durable: t.route.Durable, Pattern: &g.patterns[j],
				Total: g.bytes})
		}
	}

	// The notification goes with the last batch, or with one of its own where that cannot carry it:
	// a read's, a durable one, or one of a backend without notifications.
	if n := len(t.batches); t.notify {
		if n == 0 || t.op != Write || t.route.Durable || !t.batches[n-1].conn.notifies() {
			c := t.p.messenger(t.route)
			if c == nil {
				return t.noMessenger()
			}
			list(c, driver.Batch{Op: Write})
			n++
		}
		// The hello of its connection goes before, where it could not when that was opened. A
		// second one changes nothing.
		last := t.batches[n-1]
		c := last.conn
		if t.message[0] != wire.KindHello && !c.greeted.Load() && len(c.hello) > 0 {
			t.batches = t.batches[:n-1]
			list(c, driver.Batch{Op: Write, Tail: driver.NotifyTail, Notify: c.hello})
			t.batches = append(t.batches, last)
			t.extra().greets = c
			n++
		}
		b := &t.batches[n-1]
		b.last = n > 1
		b.Tail, b.Notify = driver.NotifyTail, t.message
		if len(t.message) > c.lane.caps.MessageMax {
			if err := t.split(b); err != nil {
				return err
			}
		}
	}
	if len(t.batches) == 0 {
		return fmt.Errorf("post transfer: nothing is listed: Add first: %w", ErrBounds)
	}

	var conns []*conn
	for i := range t.batches {
		if c := t.batches[i].conn; !slices.Contains(conns, c) {
			conns = append(conns, c)
		}
	}
	if !slices.Equal(conns, t.via()) {
		t.conns.Store(&conns)
	}
	t.dirty = false
	return nil
}

// Pages is the plain form of a Pattern: Count scattered entries of one length, each one
// run of bytes. Entry i lies at Base + index[i]*Stride on each side. A nil index list
// counts up from 0.
type Pages struct {
	Count                     int    // entries; the length of each list that is not nil
	EntryLen                  uint64 // bytes
	LocalBase, RemoteBase     uint64 // bytes
	LocalStride, RemoteStride uint64 // bytes; without a list at least EntryLen, or 0: one entry
	Local, Remote             []uint32
}

// Pattern returns the same entries as a Pattern.
func (p *Pages) Pattern() Pattern {
	return Pattern{Run: p.EntryLen, Count: p.Count,
		Local:  Side{Base: p.LocalBase, Stride: p.LocalStride, List: p.Local},
		Remote: Side{Base: p.RemoteBase, Stride: p.RemoteStride, List: p.Remote}}
}

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
		t.copyFarLists(&p)
		if !remote.only.HasRemote(&p) {
			return &OpError{Op: "add " + remote.name + " to " + local.name, Err: errBeside}
		}
	}
	t.listed(g.conn, local, remote)
	if !g.conn.acceptsPattern(&p) {
		g.expand(&p, t.lenMax(g.conn))
		return nil
	}
	g.bytes += p.Bytes()
	for most := g.conn.entriesMax(&p, t.batchMax()); p.Count > most; {
		g.patterns = append(g.patterns, cutPattern(&p, most))
	}
	g.patterns = append(g.patterns, p)
	return nil
}

// errBeside is for bytes of a Remote that its lease does not name.
var errBeside = fmt.Errorf("the lease is for other ranges, ask its owner for one of these: %w",
	ErrBounds)

// copyFarLists gives the pattern a list of the far side, and loops, that the program cannot change:
// where peers write by themselves, no later look keeps it within the ranges of its lease.
func (t *Transfer) copyFarLists(p *Pattern) {
	n := len(t.lists)
	t.lists = append(t.lists, p.Remote.List...)
	if p.Remote.List != nil {
		p.Remote.List = t.lists[n:len(t.lists):len(t.lists)]
	}
	n = len(t.loops)
	t.loops = append(t.loops, p.Loops...)
	p.Loops = t.loops[n:len(t.loops):len(t.loops)]
}

// acceptsPattern reports whether the connection takes the pattern as one, or cut between entries. A
// chain takes none with loops: a slot's list has no room for them.
func (c *conn) acceptsPattern(p *Pattern) bool {
	caps := &c.lane.caps
	if p.Runs() > caps.RunsMax || caps.LenMax > 0 && p.Run > caps.LenMax {
		return false
	}
	return c.can&driver.CanPattern != 0 && (p.Plain() || c.lane != c.lane.e.stager.lane)
}

// expand lists the runs of a pattern one by one.
func (g *group) expand(p *Pattern, lenMax uint64) {
	var runs []driver.Desc
	for i := range p.Count {
		runs = p.AppendDescs(runs[:0], i)
		for _, d := range runs {
			g.add(d, lenMax)
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

// split sends a notification in parts: the first where it would go, the others behind it.
func (t *Transfer) split(first *batch) error {
	c, rest := first.conn, t.message[1:]
	if most := t.p.notifyMax; t.message[0] != wire.KindNotification || len(rest) > most {
		err := fmt.Errorf("message of %d bytes, at most %d by Config.NotifyMax of both engines: %w",
			len(rest), most, ErrBounds)
		return &OpError{Op: "notify", Peer: t.p.name, Err: err}
	}
	room := c.lane.caps.MessageMax - wire.PartHead
	parts := (len(rest) + room - 1) / room
	t.parts = append(t.parts[:0], make([]byte, len(rest)+parts*wire.PartHead)...)
	free := t.parts
	for i := range parts {
		n := min(room, len(rest))
		part := free[: wire.PartHead+n : wire.PartHead+n]
		part[0], part[1] = wire.KindPart, 0
		if i == 0 {
			part[1] |= wire.FirstPart
		}
		if i == parts-1 {
			part[1] |= wire.LastPart
		}
		copy(part[wire.PartHead:], rest[:n])
		rest, free = rest[n:], free[wire.PartHead+n:]
		if i == 0 {
			first.Notify, first.part, t.extra().fragments = part, true, c
			continue
		}
		t.batches = append(t.batches, batch{conn: c, part: true,
			Batch: driver.Batch{Op: Write, Tail: driver.NotifyTail, Notify: part}})
	}
	return nil
}

func (t *Transfer) noMessenger() error {
	err := fmt.Errorf("no live backend of the route carries messages: %w", ErrNoRoute)
	for _, c := range t.p.conns {
		if c != nil && c.notifies() && c.isLost() {
			err = fmt.Errorf("%w: %w", err, ErrPeerLost) // one that did
			break
		}
	}
	return &OpError{Op: "notify", Peer: t.p.name, Err: err}
}

// batchBytesMax bounds what one batch moves, so that a long transfer is seen to make progress.
// Only a single entry of a pattern may be longer.
const batchBytesMax = 64 << 20

// count sums up the bytes of a batch.
func (b *batch) count() {
	for i := range b.Descs {
		b.bytes += b.Descs[i].Len
	}
	if b.Pattern != nil {
		b.bytes += b.Pattern.Bytes()
	}
}

// lenMax is the longest piece that goes to the connection.
func (t *Transfer) lenMax(c *conn) uint64 {
	if most := c.lane.caps.LenMax; most > 0 {
		return min(most, t.batchMax())
	}
	return t.batchMax()
}

// entriesMax is how many entries of a pattern go in one batch of so many bytes.
func (c *conn) entriesMax(p *Pattern, bytesMax uint64) int {
	return min(c.lane.caps.RunsMax/p.Runs(), int(max(1, bytesMax/p.EntryLen())))
}

// nextBatch is how many pieces go in one batch of so many bytes: the first ones of a list that is
// not empty.
func (c *conn) nextBatch(list []driver.Desc, bytesMax uint64) int {
	most, bytes := min(len(list), c.lane.caps.DescsMax), uint64(0)
	for n := range most {
		if bytes += list[n].Len; bytes > bytesMax && n > 0 {
			return n
		}
	}
	return most
}

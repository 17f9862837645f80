// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"slices"

	"github.com/sluicehq/sluice/driver"
)

// group is the part of a transfer's list that goes over one connection.
type group struct {
	conn  *conn
	descs []driver.Desc
	pages []Pages
	bytes uint64
}

func (g *group) clear() {
	g.conn, g.descs, g.bytes = nil, g.descs[:0], 0
	clear(g.pages) // lets go of the caller's index lists
	g.pages = g.pages[:0]
}

// batch is one call of Submit.
type batch struct {
	conn    *conn
	descs   []driver.Desc
	pages   *Pages
	message []byte // nil: none
	counts  bool   // one more for counter follows the data
	counter uint32
	durable bool     // it ends once its bytes would survive a loss of power
	sum     *summing // nil: the bytes are not compared
	last    bool     // only after all others have ended: it carries the message, or the count
}

func (b *batch) submit(op Op, tag uint64) error {
	switch {
	case b.durable:
		return b.conn.persister.SubmitDurable(tag, b.descs, b.pages)
	case b.counts:
		return b.conn.counter.SubmitCount(tag, b.descs, b.pages, b.counter)
	case b.pages != nil:
		return b.conn.pager.SubmitPages(op, tag, b.pages, b.message)
	case b.message != nil:
		return b.conn.notifier.SubmitNotify(Write, tag, b.descs, b.message) // a read's message goes alone
	}
	return b.conn.p.Submit(op, tag, b.descs)
}

// Add lists one contiguous copy of n bytes. Copies that continue the one listed
// before are merged with it.
func (t *Transfer) Add(local *Region, localOff uint64, remote *Remote, remoteOff, n uint64) error {
	g, localKey, remoteKey, err := t.join(local, remote)
	if err != nil {
		return err
	}
	d := driver.Desc{Local: localOff, Remote: remoteOff, Len: n, LocalKey: localKey, RemoteKey: remoteKey}
	if err := d.Check(local.seg.Len, remote.size); err != nil {
		return fmt.Errorf("add %s to %s: %w", remote.name, local.name, err)
	}
	caps := &g.conn.lane.caps
	if a := caps.Align; a > 1 && (localOff|remoteOff|n)&(a-1) != 0 {
		return fmt.Errorf("add: %s moves multiples of %d bytes at multiples of it: %w", caps.Name, a, ErrBounds)
	}
	g.add(d, caps.LenMax)
	t.dirty = true
	return nil
}

func (g *group) add(d driver.Desc, lenMax uint64) {
	g.bytes += d.Len
	if n := len(g.descs); n > 0 {
		prev := &g.descs[n-1]
		if prev.LocalKey == d.LocalKey && prev.RemoteKey == d.RemoteKey &&
			prev.Local+prev.Len == d.Local && prev.Remote+prev.Len == d.Remote && (lenMax == 0 || prev.Len+d.Len <= lenMax) {
			prev.Len += d.Len
			return
		}
	}
	for lenMax > 0 && d.Len > lenMax {
		piece := d
		piece.Len = lenMax
		g.descs = append(g.descs, piece)
		d.Local, d.Remote, d.Len = d.Local+lenMax, d.Remote+lenMax, d.Len-lenMax
	}
	g.descs = append(g.descs, d)
}

// AddPages lists a pattern of scattered entries. The keys of p are ignored; its
// index lists are kept by reference and must not change until the transfer is
// done for the last time or Reset.
func (t *Transfer) AddPages(local *Region, remote *Remote, p Pages) error {
	g, localKey, remoteKey, err := t.join(local, remote)
	if err != nil {
		return err
	}
	p.LocalKey, p.RemoteKey = localKey, remoteKey
	if err := p.Check(local.seg.Len, remote.size); err != nil {
		return fmt.Errorf("add pages of %s to %s: %w", remote.name, local.name, err)
	}
	caps := &g.conn.lane.caps
	if a := caps.Align; a > 1 && (p.EntryLen|p.LocalBase|p.LocalStride|p.RemoteBase|p.RemoteStride)&(a-1) != 0 {
		return fmt.Errorf("add pages: %s moves multiples of %d bytes at multiples of it: %w", caps.Name, a, ErrBounds)
	}
	t.dirty = true
	if g.conn.pager == nil || (caps.LenMax > 0 && p.EntryLen > caps.LenMax) {
		for i := range p.Count {
			g.add(p.Desc(i), caps.LenMax)
		}
		return nil
	}
	g.bytes += p.Bytes()
	for p.Count > caps.PagesMax {
		g.pages = append(g.pages, cutPages(&p, caps.PagesMax))
	}
	g.pages = append(g.pages, p)
	return nil
}

// cutPages takes the first n entries off p.
func cutPages(p *Pages, n int) Pages {
	head := *p
	head.Count = n
	head.Local, p.Local, p.LocalBase = cutList(p.Local, n, p.LocalBase, p.LocalStride)
	head.Remote, p.Remote, p.RemoteBase = cutList(p.Remote, n, p.RemoteBase, p.RemoteStride)
	p.Count -= n
	return head
}

func cutList(list []uint32, n int, base, stride uint64) (head, tail []uint32, tailBase uint64) {
	if list == nil {
		return nil, nil, base + uint64(n)*stride
	}
	return list[:n:n], list[n:], base
}

// Notify attaches a message that reaches the peer after the data is visible
// there, in place of a count. It is kept by reference until Reset. An empty message is one.
func (t *Transfer) Notify(msg []byte) error {
	if s := t.state.Load(); s != idle && s != done {
		return t.misuse("change")
	}
	if msg == nil {
		msg = []byte{}
	}
	t.message, t.notify, t.counts, t.dirty = msg, true, false, true
	return nil
}

// Count attaches one more for a counter of the peer's engine, which has it after the data
// is visible there (Engine.Counter), in place of a message.
func (t *Transfer) Count(counter uint32) error {
	if s := t.state.Load(); s != idle && s != done {
		return t.misuse("change")
	}
	if counter >= CountersMax {
		return fmt.Errorf("count on %d, below %d: %w", counter, CountersMax, ErrBounds)
	}
	t.message, t.notify, t.counts, t.counter, t.dirty = nil, false, true, counter, true
	return nil
}

// join finds or makes the group of the connection that serves a pair of
// memories.
func (t *Transfer) join(local *Region, remote *Remote) (g *group, localKey, remoteKey uint32, err error) {
	if s := t.state.Load(); s != idle && s != done {
		return nil, 0, 0, t.misuse("change")
	}
	t.holdRemote(remote) // before its key is asked for
	c, remoteKey, err := t.p.choose(local, remote, t.op, t.route)
	if err != nil {
		return nil, 0, 0, err
	}
	if err := t.hold(local); err != nil {
		return nil, 0, 0, err
	}
	if t.checked {
		if err := c.audit(); err != nil {
			return nil, 0, 0, err
		}
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

func (t *Transfer) hold(r *Region) error {
	for i := len(t.regions) - 1; i >= 0; i-- {
		if t.regions[i] == r {
			return nil
		}
	}
	if err := r.use(); err != nil {
		return err
	}
	t.regions = append(t.regions, r)
	return nil
}

// holdRemote keeps the imported key from being given to other memory.
func (t *Transfer) holdRemote(m *Remote) {
	for i := len(t.remotes) - 1; i >= 0; i-- {
		if t.remotes[i] == m {
			return
		}
	}
	m.mu.Lock()
	m.users++
	m.mu.Unlock()
	t.remotes = append(t.remotes, m)
}

// prepare cuts the list into batches. It does nothing when the list is as it was.
func (t *Transfer) prepare() error {
	if !t.dirty {
		if len(t.batches) == 0 {
			return fmt.Errorf("post transfer: nothing is listed: Add first: %w", ErrBounds)
		}
		return nil
	}
	clear(t.batches)
	t.batches, t.bytes = t.batches[:0], 0
	for i := range t.groups {
		g := &t.groups[i]
		t.bytes += g.bytes
		if t.checked {
			if err := t.prepareSummed(g); err != nil {
				return err
			}
			continue
		}
		for rest := g.descs; len(rest) > 0; {
			n := min(len(rest), g.conn.lane.caps.DescsMax)
			t.batches = append(t.batches, batch{conn: g.conn, descs: rest[:n:n], durable: t.route.Durable})
			rest = rest[n:]
		}
		for j := range g.pages {
			t.batches = append(t.batches, batch{conn: g.conn, pages: &g.pages[j], durable: t.route.Durable})
		}
	}
	if err := t.attach(); err != nil {
		return err
	}
	if len(t.batches) == 0 {
		return fmt.Errorf("post transfer: nothing is listed: Add first: %w", ErrBounds)
	}
	t.listConns()
	t.dirty = false
	return nil
}

func (t *Transfer) listConns() {
	var list []*conn
	for i := range t.batches {
		if c := t.batches[i].conn; !slices.Contains(list, c) {
			list = append(list, c)
		}
	}
	if !slices.Equal(list, t.via()) {
		t.conns.Store(&list)
	}
}

// attach gives the message or the count to the last batch, or to one of its own where
// that cannot carry it: a read's, a durable one, or one of a backend without messages.
func (t *Transfer) attach() error {
	if !t.notify && !t.counts {
		return nil
	}
	n := len(t.batches)
	if n == 0 || t.op != Write || t.checked || t.route.Durable || !t.batches[n-1].conn.carries(t.counts) {
		c := t.p.messenger(t.route, t.counts)
		if c == nil {
			return t.noMessenger()
		}
		t.batches = append(t.batches, batch{conn: c})
		n++
	}
	b := &t.batches[n-1]
	if err := checkMessage(b.conn, t.message); err != nil {
		return err
	}
	b.message, b.counts, b.counter, b.last = t.message, t.counts, t.counter, n > 1
	return nil
}

func (t *Transfer) noMessenger() error {
	if t.counts {
		return &OpError{Op: "count", Peer: t.p.name, Err: fmt.Errorf("no live backend of the route counts at the peer: %w", ErrNoRoute)}
	}
	return &OpError{Op: "notify", Peer: t.p.name, Err: fmt.Errorf("no live backend of the route carries messages: %w", ErrNoRoute)}
}

func checkMessage(c *conn, msg []byte) error {
	if limit := c.lane.caps.MessageMax; len(msg) > limit {
		return &OpError{Op: "notify", Backend: c.lane.caps.Name, Err: fmt.Errorf("message of %d bytes, at most %d: %w", len(msg), limit, ErrBounds)}
	}
	return nil
}

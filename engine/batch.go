// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"slices"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine/internal/exchange"
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
	conn *conn
	last bool // only after all before it have ended: it carries the notification
	part bool // of a notification that one message has no room for
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
	g.add(d, g.conn.lenMax())
	t.dirty = true
	return nil
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
	if !t.look().atRest() {
		return t.misuse("change")
	}
	t.attachFrame(append(append(t.frame[:0], exchange.IsNotification), msg...))
	t.frame, t.text = t.message, msg
	return nil
}

// attachFrame has a message of the engine follow the data. Its first byte says what it is.
func (t *Transfer) attachFrame(b []byte) {
	t.message, t.text, t.notify, t.dirty = b, nil, true, true
}

// join finds or makes the group of the connection that serves a pair of
// memories.
func (t *Transfer) join(local *Region, remote *Remote) (g *group, localKey, remoteKey uint32,
	err error) {
	if !t.look().atRest() {
		return nil, 0, 0, t.misuse("change")
	}
	if err := t.p.owns(local, remote); err != nil {
		return nil, 0, 0, err // and nothing of another peer's is ever in the list
	}
	t.holdRemote(remote) // before its key is asked for
	c, remoteKey, err := t.p.choose(local, remote, t.op, t.route, len(t.groups) == 0)
	if err != nil {
		return nil, 0, 0, err
	}
	if err := t.hold(local); err != nil {
		return nil, 0, 0, err
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
	t.refresh()
	if !t.dirty {
		if len(t.batches) == 0 {
			return fmt.Errorf("post transfer: nothing is listed: Add first: %w", ErrBounds)
		}
		return nil
	}
	clear(t.batches)
	t.batches, t.bytes, t.greets = t.batches[:0], 0, nil
	for i := range t.groups {
		g := &t.groups[i]
		t.bytes += g.bytes
		for rest := g.descs; len(rest) > 0; {
			n := g.conn.nextBatch(rest)
			t.list(g.conn, driver.Batch{Op: t.op, Durable: t.route.Durable, Descs: rest[:n:n]})
			rest = rest[n:]
		}
		for j := range g.patterns {
			t.list(g.conn, driver.Batch{Op: t.op, Durable: t.route.Durable,
				Pattern: &g.patterns[j]})
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

func (t *Transfer) list(c *conn, b driver.Batch) {
	t.batches = append(t.batches, batch{Batch: b, conn: c})
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

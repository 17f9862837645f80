// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"

	"github.com/sluicehq/sluice/csrc/crc"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine/internal/exchange"
	"github.com/sluicehq/sluice/internal/memfault"
)

// Checksum has the bytes of the transfer compared, by CRC-32C, until Reset. The peer's engine
// sums what lies in its memory, once the bytes of a Write are there, and this engine sums its
// own: only ranges that agree are done. What is promised, over any backend:
//
//   - The transfer succeeds, and its message or count goes, only if each range had the same sum
//     on both sides after it was moved. Otherwise it ends with a *CorruptError, which is
//     ErrCorrupt and names a range, and nothing follows the data. The target's memory has
//     what was wrong until it is written anew: a Write is one-sided, and takes nothing back.
//   - A sum is of memory as it is at that moment. What else is written to the range between the
//     move and the outcome, another range of the same transfer too, is taken for corruption, and
//     what comes to be wrong later is not found.
//   - CRC-32C finds every error of up to 32 bits in a row, and all but one in 2^32 of others. It is
//     no proof against a peer that lies.
//
// Both memories must be DRAM, and the backend that moves the bytes must carry messages. It
// costs reading the bytes once more on both sides, and a round trip.
func (t *Transfer) Checksum() error {
	if !t.look().atRest() {
		return t.misuse("change")
	}
	for i := range t.groups {
		if err := t.groups[i].conn.audit(); err != nil {
			return err
		}
	}
	t.checked, t.dirty = true, true
	return nil
}

// CorruptError is a range whose bytes are not those of the other side. It is ErrCorrupt.
type CorruptError struct {
	Op          Op
	Peer        string
	Region      string // the peer's name for it
	Offset, Len uint64 // bytes, in that region
}

// Error implements error.
func (e *CorruptError) Error() string {
	return fmt.Sprintf("%v of %d bytes at %d of region %s of peer %s: the two sides' checksums "+
		"differ: move them again, and mistrust the way if it happens again: %v",
		e.Op, e.Len, e.Offset, e.Region, e.Peer, ErrCorrupt)
}

// Unwrap makes it ErrCorrupt.
func (e *CorruptError) Unwrap() error { return ErrCorrupt }

// sumBytes is how much of a transfer is summed at a time: small enough that moving the next
// part and summing this one overlap.
const sumBytes = exchange.SumMax

// summing is what a batch needs whose bytes are compared.
type summing struct {
	way     *sumWay
	request []byte // to the peer's engine; the tag is put in by each post
	local   *Region
	remote  *Remote
	descs   []driver.Desc // what is compared: these, or
	pages   *Pattern
	op      Op
}

// The states of a batch whose bytes are compared, by its bit.
const (
	sumIdle    uint32 = iota
	sumFlying         // neither moved nor answered
	sumMoved          // the answer is missing
	sumHeard          // its completion is missing
	sumWorking        // being compared; the goroutine that compares ends it
)

// sums is what a transfer has for batches under way whose bytes are compared.
type sums struct {
	state [batchesInFlight]atomic.Uint32
	batch [batchesInFlight]int // by bit; set before the batch is submitted
	heard [batchesInFlight][]byte
}

// prepareSummed cuts a group's list into batches that can be compared.
func (t *Transfer) prepareSummed(g *group) error {
	if t.sums == nil {
		t.sums = &sums{}
	}
	t.greet(g.conn)
	c := &sumCutter{t: t, g: g}
	for i := range g.descs {
		if err := c.add(g.descs[i]); err != nil {
			return err
		}
	}
	for i := range g.patterns {
		if err := c.addPattern(&g.patterns[i]); err != nil {
			return err
		}
	}
	c.cut()
	return c.list()
}

// sumCutter makes batches of a list.
type sumCutter struct {
	t     *Transfer
	g     *group
	descs []driver.Desc // of the batch under way
	bytes uint64
	made  []summing
}

func (c *sumCutter) add(d driver.Desc) error {
	most := min(c.g.conn.lane.caps.DescsMax, exchange.SumDescsMax(c.g.conn.lane.caps.MessageMax))
	if most < 1 {
		return c.noRoom()
	}
	for d.Len > 0 {
		if n := len(c.descs); n == most || c.bytes >= sumBytes || n > 0 &&
			(c.descs[0].LocalKey != d.LocalKey || c.descs[0].RemoteKey != d.RemoteKey) {
			c.cut()
		}
		piece := d
		piece.Len = min(d.Len, sumBytes-c.bytes)
		c.descs = append(c.descs, piece)
		c.bytes += piece.Len
		d.Local, d.Remote, d.Len = d.Local+piece.Len, d.Remote+piece.Len, d.Len-piece.Len
	}
	return nil
}

func (c *sumCutter) cut() {
	if len(c.descs) > 0 {
		c.made = append(c.made, summing{descs: c.descs})
		c.descs, c.bytes = nil, 0
	}
}

func (c *sumCutter) addPattern(p *Pattern) error {
	most := exchange.SumEntriesMax(c.g.conn.lane.caps.MessageMax)
	if most < 1 {
		return c.noRoom()
	}
	if !p.Plain() || p.Run > sumBytes {
		return c.addRuns(p)
	}
	c.cut()
	rest := *p
	for most = min(most, int(sumBytes/p.Run)); rest.Count > most; {
		head := cutPattern(&rest, most)
		c.made = append(c.made, summing{pages: &head})
	}
	c.made = append(c.made, summing{pages: &rest})
	return nil
}

// addRuns adds the runs of a pattern one by one.
func (c *sumCutter) addRuns(p *Pattern) error {
	var runs []driver.Desc
	for i := range p.Count {
		runs = p.AppendDescs(runs[:0], i)
		for _, d := range runs {
			if err := c.add(d); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *sumCutter) noRoom() error {
	l := c.g.conn.lane
	return &OpError{Op: "checksum", Backend: l.caps.Name,
		Err: fmt.Errorf("its messages of at most %d bytes are too short for any list: %w",
			l.caps.MessageMax, ErrNotSupported)}
}

// list gives a Write's batch its request, which follows the data; a Read's has one of its own,
// for when all data is here.
func (c *sumCutter) list() error {
	t, conn := c.t, c.g.conn
	moved := len(t.batches)
	for i := range c.made {
		s := &c.made[i]
		if err := c.complete(s); err != nil {
			return err
		}
		t.list(conn, driver.Batch{Op: t.op, Descs: s.descs, Pattern: s.pages})
		b := &t.batches[len(t.batches)-1]
		if t.op == Write {
			b.sum = s
			b.ask()
		}
	}
	if t.op == Write {
		return nil
	}
	for i := range c.made {
		s := &c.made[i]
		t.list(conn, driver.Batch{Op: Write})
		b := &t.batches[len(t.batches)-1]
		b.sum, b.last = s, i == 0 && moved+len(c.made) > 0
		b.ask()
	}
	return nil
}

// ask has the request follow the bytes. Where the peer is this engine none goes.
func (b *batch) ask() {
	if !b.sum.way.self {
		b.Tail, b.Notify = driver.NotifyTail, b.sum.request
	}
}

// complete fills in what the batch is about.
func (c *sumCutter) complete(s *summing) error {
	var localKey, remoteKey uint32
	if s.pages != nil {
		localKey, remoteKey = s.pages.LocalKey, s.pages.RemoteKey
	} else {
		localKey, remoteKey = s.descs[0].LocalKey, s.descs[0].RemoteKey
	}
	lane := c.g.conn.lane.index
	for _, r := range c.t.regions {
		if m := r.mems[lane]; m != nil && m.Key() == localKey {
			s.local = r
		}
	}
	for _, m := range c.t.remotes {
		if m.tokens[lane] == nil {
			continue
		}
		if key, err := m.key(lane); err == nil && key == remoteKey {
			s.remote = m
		}
	}
	if s.local == nil || s.remote == nil {
		return fmt.Errorf("checksum: a region of the list is gone: Reset and Add it again: %w",
			ErrRevoked)
	}
	if s.local.seg.Kind != driver.DRAM || s.remote.kind != driver.DRAM {
		return &OpError{Op: "checksum", Peer: c.t.p.name,
			Err: fmt.Errorf("of %v and %v: both sides must be DRAM: %w", s.local.seg.Kind,
				s.remote.kind, ErrNotSupported)}
	}
	s.op, s.way = c.t.op, c.g.conn.sums.Load()
	var err error
	s.request, err = exchange.AppendSum(nil, s.remote.tokens[lane], s.descs, s.pages)
	return err
}

// submitSum is submit for a batch whose bytes are compared.
func (b *batch) submitSum(t *Transfer, tag uint64, index, bit int) error {
	way := b.sum.way
	if !way.begin() {
		return driver.ErrFull
	}
	t.sums.batch[bit], t.sums.heard[bit] = index, nil
	t.sums.state[bit].Store(sumFlying)
	exchange.SetSumTag(b.sum.request, tag)
	var err error
	switch {
	case way.self && b.Descs == nil && b.Pattern == nil: // a Read's: all bytes are here
		t.sums.state[bit].Store(sumWorking)
		way.push(sumWork{t, tag})
	default:
		err = b.conn.p.Submit(tag, &b.Batch)
	}
	if err != nil {
		t.sums.state[bit].Store(sumIdle)
		way.end()
	}
	return err
}

// summed returns what the batch of a bit is to be compared by; nil: it is not.
func (t *Transfer) summed(bit int) *summing {
	if t.sums == nil || t.sums.state[bit].Load() == sumIdle {
		return nil
	}
	return t.batches[t.sums.batch[bit]].sum
}

// moved notes that the bytes of a batch are there, unless it has failed. later: its end comes
// when they have been compared. Otherwise it ends now, with that error.
func (t *Transfer) moved(bit int, tag uint64, err error) (later bool, end error) {
	s := t.summed(bit)
	if s == nil {
		return false, err
	}
	state := &t.sums.state[bit]
	if err != nil {
		if state.Swap(sumIdle) != sumIdle {
			s.way.end()
		}
		return false, err
	}
	switch {
	case s.way.self && state.CompareAndSwap(sumFlying, sumWorking), state.CompareAndSwap(sumHeard,
		sumWorking):
		s.way.push(sumWork{t, tag})
	case state.CompareAndSwap(sumFlying, sumMoved):
		// The goroutine that ends all waits may have looked before.
		if t.look().has(stopped) && t.forsake(bit) {
			return false, ErrAborted
		}
		if s.way.conn.isLost() && t.forsake(bit) {
			return false, ErrPeerLost
		}
	case state.CompareAndSwap(sumHeard, sumWorking): // the answer has overtaken us just now
		s.way.push(sumWork{t, tag})
	}
	return true, nil
}

// forsake ends the wait for an answer. It reports whether there was one.
func (t *Transfer) forsake(bit int) bool {
	s := t.summed(bit)
	if s == nil || !t.sums.state[bit].CompareAndSwap(sumMoved, sumIdle) {
		return false
	}
	s.way.end()
	return true
}

// forsakeAll ends all waits for answers, over one connection or (nil) over all.
// Preconditions: the post is held.
func (t *Transfer) forsakeAll(of *conn, why error) {
	if t.sums == nil {
		return
	}
	generation := t.look().generation()
	for bit := range batchesInFlight {
		s := t.summed(bit)
		if s == nil || of != nil && s.way.conn != of || !t.forsake(bit) {
			continue
		}
		t.endBatch(s.way.conn.lane, generation, bit, why)
	}
}

// ranges returns how many ranges a batch has, and where each lies on this side and on the peer's.
func (s *summing) ranges() int {
	if s.pages != nil {
		return s.pages.Count
	}
	return len(s.descs)
}

func (s *summing) at(i int) driver.Desc {
	if s.pages != nil {
		return s.pages.Desc(i)
	}
	return s.descs[i]
}

// compare looks at the peer's sums; nil: they are ours.
func (s *summing) compare(theirs []byte, peer string) (err error) {
	defer memfault.Catch(&err, memfault.Begin())
	n := s.ranges()
	if len(theirs) != 4*n {
		return fmt.Errorf("an answer with %d bytes of sums, want %d: %w", len(theirs), 4*n,
			ErrCorrupt)
	}
	mem := s.local.seg.Mem
	for i := range n {
		d := s.at(i)
		if size := uint64(len(mem)); d.Local > size || d.Len > size-d.Local {
			return &OpError{Op: "checksum of " + s.op.String(), Peer: peer,
				Err: fmt.Errorf("an index list was changed while it was posted: %w", ErrBounds)}
		}
		if crc.Checksum(mem[d.Local:d.Local+d.Len]) != binary.LittleEndian.Uint32(theirs[4*i:]) {
			return &CorruptError{Op: s.op, Peer: peer, Region: s.remote.name, Offset: d.Remote,
				Len: d.Len}
		}
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"slices"
	"sync"
	"time"

	copies "github.com/sluicehq/sluice/csrc/copy"
	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
)

// fakeLink is one end of a connection of fakeNet.
type fakeLink struct {
	net       *fakeNet
	id        uint64
	initiator bool
	running   sync.WaitGroup

	credits int  // net.mu
	starved bool // net.mu

	mu      sync.Mutex
	more    sync.Cond
	listed  []driver.Desc // what Submit looks at
	pairs   [verbs.PairsMax]*fakePair
	held    [verbs.PairsMax]bool // has failed, and is not settled
	queue   []*fakeBatch
	busy    bool // run has a batch in hand
	slots   []*fakeSlot
	drained bool
	ended   bool
	status  int32
	doubt   int32 // status of what may land still
	closed  bool
	sent    uint64 // messages of an initiator
	seen    uint64 // of an owner
	turn    int
	echo    int // the next so many pieces arrive, and their queue pair fails before it is known
	last    int // so many messages arrive at an owner while the next queue pair ends

	pairOver, over time.Time // when PairEnd was called last, and End first
}

// fakePair is a queue pair.
type fakePair struct {
	link   *fakeLink
	pair   int
	number uint32
	rail   *fakeRail
	other  uint32   // 0: not begun
	gid    [16]byte // of the other
	live   bool
}

type fakeSlot struct {
	verbs.Import
	expired bool
}

type fakeBatch struct {
	op        driver.Op
	tag       uint64
	descs     []driver.Desc
	remotes   []*fakeSlot
	msg       []byte
	noted     bool
	cancelled bool
}

const fakePiece = 64 << 10

func (l *fakeLink) ID() uint64 { return l.id }

func (l *fakeLink) PairMake(pair, rail int) (verbs.End, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fakeWire.Lock()
	defer fakeWire.Unlock()
	if l.pairs[pair] != nil {
		return verbs.End{}, driver.ErrBusy
	}
	if l.net.rails[rail].gone {
		return verbs.End{}, driver.ErrNoRoute
	}
	fakeWire.next++
	p := &fakePair{link: l, pair: pair, number: fakeWire.next, rail: l.net.rails[rail]}
	l.pairs[pair], fakeWire.pairs[p.number] = p, p
	return verbs.End{QueuePair: p.number, GID: p.rail.gid}, nil
}

func (l *fakeLink) PairBegin(pair int, theirs verbs.End) error {
	l.mu.Lock()
	p := l.pairs[pair]
	if p == nil || l.held[pair] {
		l.mu.Unlock()
		return driver.ErrBusy
	}
	fakeWire.Lock()
	p.other, p.gid = theirs.QueuePair, theirs.GID
	fakeWire.Unlock()
	l.mu.Unlock()
	if l.initiator {
		l.running.Go(func() { l.probe(p) })
	}
	return nil
}

// probe waits for the other end, as a queue pair retries.
func (l *fakeLink) probe(p *fakePair) {
	for range 20 {
		if _, ok := p.reach(); ok {
			l.mu.Lock()
			p.live = l.pairs[p.pair] == p
			if p.live {
				l.net.tell(verbs.News{Conn: l.id, Kind: verbs.PairLive, Pair: p.pair})
			}
			l.more.Broadcast()
			l.mu.Unlock()
			return
		}
		time.Sleep(time.Millisecond)
	}
	l.fail(p, 12)
}

// carries reports whether queue pairs over a rail are given anything.
func (r *fakeRail) carries() bool {
	fakeWire.Lock()
	defer fakeWire.Unlock()
	return !r.down
}

// reach returns the other end, if both are there, know each other, and bytes pass.
func (p *fakePair) reach() (*fakePair, bool) {
	fakeWire.Lock()
	defer fakeWire.Unlock()
	q := fakeWire.pairs[p.other]
	ok := fakeWire.pairs[p.number] == p && q != nil && q.other == p.number &&
		q.rail.gid == p.gid && !p.rail.cut && !q.rail.cut
	return q, ok
}

// fail ends a queue pair and tells.
func (l *fakeLink) fail(p *fakePair, status int32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.pairs[p.pair] == p {
		l.drop(p.pair)
		l.net.tell(verbs.News{Conn: l.id, Kind: verbs.PairFailed, Pair: p.pair, Status: status})
	}
}

// drop destroys a queue pair. Preconditions: l.mu is held.
func (l *fakeLink) drop(pair int) {
	p := l.pairs[pair]
	if p == nil {
		return
	}
	fakeWire.Lock()
	delete(fakeWire.pairs, p.number)
	fakeWire.Unlock()
	p.live = false
	l.pairs[pair] = nil
	l.held[pair] = l.initiator
	l.more.Broadcast()
}

func (l *fakeLink) PairEnd(pair int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seen, l.last = l.seen+uint64(l.last), 0
	l.pairOver = time.Unix(0, l.net.clock.Now())
	l.drop(pair)
	return nil
}

func (l *fakeLink) PairSettle(pair int, seen uint64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if seen > l.sent {
		return driver.ErrCorrupt
	}
	l.held[pair] = false
	l.seen = seen
	l.more.Broadcast()
	return nil
}

func (l *fakeLink) Seen() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.seen
}

func (l *fakeLink) Import(m verbs.Import) (uint32, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	m.RemoteKeys = slices.Clone(m.RemoteKeys)
	for i := range l.slots {
		if l.slots[i] == nil {
			l.slots[i] = &fakeSlot{Import: m}
			return uint32(i), nil
		}
	}
	l.slots = append(l.slots, &fakeSlot{Import: m})
	return uint32(len(l.slots) - 1), nil
}

func (l *fakeLink) Drop(slot uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.slots[slot] = nil
}

func (l *fakeLink) Expire(slot uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.slots[slot] != nil {
		l.slots[slot].expired = true
	}
}

func (l *fakeLink) Submit(tag uint64, b *driver.Batch) error {
	n, at := len(b.Descs), func(i int) driver.Desc { return b.Descs[i] }
	if p := b.Pattern; p != nil {
		l.mu.Lock()
		remote := l.imported(p.RemoteKey)
		l.mu.Unlock()
		local := l.net.memory(p.LocalKey)
		if remote == nil || local == nil {
			return driver.ErrBounds
		}
		if err := p.Check(uint64(len(local.bytes)), remote.Size); err != nil {
			return err
		}
		n, at = p.Count*p.Runs(), func(i int) driver.Desc {
			d := copies.Run(p, i)
			d.LocalKey, d.RemoteKey = p.LocalKey, p.RemoteKey
			return d
		}
	}
	msg := b.Notify
	if b.Tail == driver.NoTail {
		msg = nil
	} else if msg == nil {
		msg = []byte{}
	}
	return l.submit(b.Op, tag, n, at, msg)
}

func (l *fakeLink) imported(slot uint32) *fakeSlot {
	if uint64(slot) >= uint64(len(l.slots)) {
		return nil
	}
	return l.slots[slot]
}

// check looks at a batch. Preconditions: l.mu is held.
func (l *fakeLink) check(op driver.Op, descs []driver.Desc) error {
	if l.drained || l.ended {
		return driver.ErrClosed
	}
	for _, d := range descs {
		remote, local := l.imported(d.RemoteKey), l.net.memory(d.LocalKey)
		if remote == nil || local == nil {
			return driver.ErrBounds
		}
		if err := d.Check(uint64(len(local.bytes)), remote.Size); err != nil {
			return err
		}
		if op == driver.Write && remote.ReadOnly {
			return driver.ErrReadOnly
		}
		if remote.expired {
			return driver.ErrRevoked
		}
	}
	return nil
}

func (l *fakeLink) submit(op driver.Op, tag uint64, n int, at func(int) driver.Desc, msg []byte,
) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.listed = l.listed[:0]
	for i := range n {
		l.listed = append(l.listed, at(i)) // once: a list may change meanwhile
	}
	if err := l.check(op, l.listed); err != nil {
		return err
	}
	l.net.mu.Lock()
	full := l.net.taken == l.net.cfg.BatchesMax
	if msg != nil && l.credits == 0 {
		full, l.starved = true, true
	}
	if full {
		l.net.mu.Unlock()
		return driver.ErrFull
	}
	if msg != nil {
		l.credits--
	}
	l.net.taken++
	l.net.mu.Unlock()
	b := l.net.batch()
	b.op, b.tag, b.noted, b.cancelled = op, tag, msg != nil, false
	b.descs, b.remotes, b.msg = b.descs[:0], b.remotes[:0], append(b.msg[:0], msg...)
	for _, d := range l.listed {
		b.descs = append(b.descs, d)
		b.remotes = append(b.remotes, l.imported(d.RemoteKey))
	}
	l.queue = append(l.queue, b)
	l.more.Broadcast()
	return nil
}

// run is the thread of an initiator's end.
func (l *fakeLink) run() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		for len(l.queue) == 0 && !l.closed {
			l.more.Wait()
		}
		if len(l.queue) == 0 {
			return
		}
		b := l.queue[0]
		l.queue = append(l.queue[:0], l.queue[1:]...)
		l.busy = true
		l.mu.Unlock()
		l.carry(b)
		l.mu.Lock()
		l.busy = false
		l.more.Broadcast()
	}
}

// carry runs a batch to its end.
func (l *fakeLink) carry(b *fakeBatch) {
	status := verbs.OK
	for i := range b.descs {
		for off := uint64(0); off < b.descs[i].Len && status == verbs.OK; off += fakePiece {
			status = l.piece(b, i, off)
		}
	}
	if b.noted && status == verbs.OK {
		status = l.notif(b)
	}
	l.net.mu.Lock()
	if b.noted && status != verbs.OK {
		l.credits++
	}
	l.net.mu.Unlock()
	l.net.complete(b, status)
}

// queue pair waits for one that is live, in turn. Otherwise it says why the batch ends.
func (l *fakeLink) pair(b *fakeBatch) (*fakePair, int32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		switch {
		case l.ended:
			return nil, l.status
		case b.cancelled:
			return nil, verbs.Aborted
		}
		for range l.pairs {
			l.turn = (l.turn + 1) % len(l.pairs)
			if p := l.pairs[l.turn]; p != nil && p.live && p.rail.carries() {
				return p, verbs.OK
			}
		}
		l.more.Wait()
	}
}

// piece moves a part of a descriptor over some queue pair, as often as queue pairs fail.
func (l *fakeLink) piece(b *fakeBatch, i int, off uint64) int32 {
	for {
		p, status := l.pair(b)
		if status != verbs.OK {
			return status
		}
		l.mu.Lock()
		expired := b.remotes[i].expired
		l.mu.Unlock()
		if expired {
			return verbs.Revoked
		}
		if _, ok := p.reach(); !ok {
			l.fail(p, 12)
			if status := l.settled(p.pair, b.op); status != verbs.OK {
				return status
			}
			continue
		}
		if !l.move(b.op, &b.descs[i], off, b.remotes[i], b.remotes[i].RemoteKeys[p.pair]) {
			l.fail(p, 10)
			return verbs.Revoked
		}
		if l.echoes() {
			l.fail(p, 12)
			if status := l.settled(p.pair, b.op); status != verbs.OK {
				return status
			}
			continue // it landed, and is posted again all the same
		}
		return verbs.OK
	}
}

// echoes reports whether the answer to what was just done is lost.
func (l *fakeLink) echoes() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.echo == 0 {
		return false
	}
	l.echo--
	return true
}

// settled waits until the other end of a queue pair that has failed is gone. Otherwise it says how
// the batch ends.
func (l *fakeLink) settled(pair int, op driver.Op) int32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.held[pair] && !l.ended {
		l.more.Wait()
	}
	switch {
	case !l.held[pair]:
		return verbs.OK
	case op == driver.Read:
		return l.status
	}
	return l.doubt
}

// move copies one piece, and reports whether the key was good for it.
func (l *fakeLink) move(op driver.Op, d *driver.Desc, off uint64, remote *fakeSlot,
	key uint32) bool {
	fakeWire.Lock()
	g := fakeWire.grants[key]
	fakeWire.Unlock()
	local := l.net.memory(d.LocalKey)
	if g == nil || local == nil {
		return false
	}
	n := min(fakePiece, d.Len-off)
	at := remote.Base - g.base + d.Remote + off
	g.mu.RLock()
	defer g.mu.RUnlock()
	switch {
	case g.over || g.readOnly && op == driver.Write || at+n > uint64(len(g.bytes)):
		return false
	case op == driver.Write:
		copy(g.bytes[at:][:n], local.bytes[d.Local+off:])
	default:
		copy(local.bytes[d.Local+off:][:n], g.bytes[at:])
	}
	return true
}

// notif delivers a message, once.
func (l *fakeLink) notif(b *fakeBatch) int32 {
	l.mu.Lock()
	l.sent++
	number := l.sent
	l.mu.Unlock()
	for {
		p, status := l.pair(b)
		if status != verbs.OK {
			l.mu.Lock()
			l.sent--
			l.mu.Unlock()
			return status
		}
		q, ok := p.reach()
		if ok {
			q.link.deliver(l, b, number)
			if !l.echoes() {
				return verbs.OK
			}
		}
		l.fail(p, 12)
		if status := l.settled(p.pair, driver.Write); status != verbs.OK {
			return status
		}
		l.mu.Lock()
		done := l.seen >= number
		l.mu.Unlock()
		if done {
			return verbs.OK
		}
	}
}

// deliver puts a message into the ring of an owner.
func (l *fakeLink) deliver(from *fakeLink, b *fakeBatch, number uint64) {
	l.mu.Lock()
	fresh := number == l.seen+1
	if fresh {
		l.seen = number
	}
	l.mu.Unlock()
	if !fresh {
		return
	}
	l.net.mu.Lock()
	l.net.notifs = append(l.net.notifs,
		fakeNotif{from, verbs.Notif{Conn: l.id, Data: slices.Clone(b.msg)}})
	l.net.wake()
	l.net.mu.Unlock()
}

// repay says that the owner has a place for one more message.
func (l *fakeLink) repay() {
	l.net.mu.Lock()
	defer l.net.mu.Unlock()
	l.credits++
	if l.starved {
		l.starved, l.net.room = false, true
		l.net.wake()
	}
}

func (l *fakeLink) Cancel(tag uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, b := range l.queue {
		if b.tag == tag {
			b.cancelled = true
		}
	}
}

func (l *fakeLink) Busy() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.busy || len(l.queue) > 0
}

// Drain waits until nothing is under way.
func (l *fakeLink) Drain(grace time.Duration) error {
	l.mu.Lock()
	l.drained = true
	l.mu.Unlock()
	for end := time.Unix(0, l.net.clock.Now()).Add(grace); ; time.Sleep(20 * time.Microsecond) {
		l.mu.Lock()
		done := len(l.queue) == 0 && !l.busy || l.ended
		l.mu.Unlock()
		if done {
			return nil
		}
		if time.Unix(0, l.net.clock.Now()).After(end) {
			return driver.ErrTimeout
		}
	}
}

func (l *fakeLink) End(status int32, proved bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.pairs {
		l.drop(i)
	}
	if l.ended {
		return nil
	}
	l.ended, l.status, l.over = true, status, time.Unix(0, l.net.clock.Now())
	switch {
	case proved:
		l.doubt = status
	case status == verbs.Lost:
		l.doubt = verbs.LostUnproven
	default:
		l.doubt = verbs.ClosedUnproven
	}
	for _, b := range l.queue {
		l.net.complete(b, status)
	}
	l.queue = nil
	l.more.Broadcast()
	for l.busy {
		l.more.Wait()
	}
	return nil
}

func (l *fakeLink) Close() error {
	_ = l.End(verbs.Closed, false)
	l.mu.Lock()
	l.closed = true
	l.more.Broadcast()
	l.mu.Unlock()
	l.running.Wait()
	l.net.mu.Lock()
	delete(l.net.links, l.id)
	l.net.mu.Unlock()
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/wire"
)

// Notification is a message from a peer, delivered after the data that it came
// with is visible here.
//
// Where the engines met by Serve and Dial, Peer is proved: a message has it only if it came
// by a connection of the engine with which that exchange was made, and From is the name that
// this engine gave. Between engines that met by plain Connect, through descriptions that the
// program has sent, both are what the sender claims.
//
// The last word of a connection (Err) is about that connection alone: an engine that is
// connected by two backends, or that has dialled twice, has one for each. That of a connection by
// which no message came is left out while half of the channel is full.
type Notification struct {
	Peer    *Peer  // of the sending engine; nil: this engine has not connected to it
	Backend string // that carried it
	From    string // name of the sending engine: see below
	Data    []byte // the receiver's to keep
	Err     error  // ErrPeerLost: one connection of the sender has ended; Data is nil
}

// Notifications is where a goroutine waits for messages. The channel is never
// closed: also wait for an end of your own. Messages of one peer over one backend
// arrive in the order in which their transfers were posted, that of a transfer
// of several batches when its last batch went. When the program does not read, the channel
// fills, then the senders' transfers wait and end with ErrTimeout, and so do chains (Staged) to and
// from this engine: a program that peers may send messages to has to read them.
func (e *Engine) Notifications() <-chan Notification { return e.inbox }

// receive moves the backend's messages into the channel. When that is full a
// goroutine waits for room, and the rest stays with the backend, which holds
// back the senders. A goroutine that finds the lock taken sets a flag, as in poll.
func (l *lane) receive() (found bool) {
	found, _ = l.receiveFor(math.MaxInt)
	return found
}

// receiveFor is receive, of so many rounds at most. more: others have brought some since.
func (l *lane) receiveFor(rounds int) (found, more bool) {
	if !l.notifies() {
		return false, false
	}
	l.received.Add(1)
	for asked := uint64(0); l.received.Load() != asked && l.receiveMu.TryLock(); {
		asked = l.received.Load()
		for n := len(l.messages); n > 0 && !l.delivering && rounds > 0; rounds-- {
			n, _ = l.b.Receive(l.messages[:])
			found = found || n > 0
			for i := range n {
				first, ok := l.dispatch(&l.messages[i])
				if ok && !l.e.offer(first) {
					l.deliverLater(first, l.messages[i+1:n])
					break
				}
			}
		}
		l.receiveMu.Unlock()
		if rounds == 0 {
			return found, true
		}
	}
	return found, false
}

// deliverLater waits for room in a goroutine of its own.
// Preconditions: l.receiveMu is held.
func (l *lane) deliverLater(first Notification, rest []driver.Message) {
	l.delivering = true
	notes := []Notification{first}
	for i := range rest {
		if n, ok := l.dispatch(&rest[i]); ok {
			notes = append(notes, n)
		}
	}
	e := l.e
	e.running.Go(func() {
		for _, n := range notes {
			large := e.isLarge(&n) // of these only offer counts the bytes
			for sent := large && e.offer(n); !sent; {
				room, pause := e.inbox, (<-chan time.Time)(nil)
				if large {
					room, pause = nil, time.After(inboxPause)
				}
				select {
				case room <- n:
					e.inboxed.went.Add(1)
					sent = true
				case <-pause:
					sent = e.offer(n)
				case <-e.closing:
					return
				}
			}
		}
		l.receiveMu.Lock()
		l.delivering = false
		l.receiveMu.Unlock()
		l.receive()
	})
}

// MessageMax returns how many bytes a notification to the peer may have at most: the
// smaller Config.NotifyMax of the two engines. 0: no backend that connects it carries any.
func (p *Peer) MessageMax() int {
	for _, c := range p.conns {
		if c != nil && c.notifies() {
			return p.notifyMax
		}
	}
	return 0
}

// Notify sends a message without data and returns when it is on its way. What a backend has taken
// and the peer has yet to acknowledge then, as over tcp, is lost with its connection alone, and
// nothing is told of it. Peer.Close and Engine.Close give it time (tcp: Config.CloseMax); a process
// that ends without them may not. To hear of a loss, post a Transfer that has a message alone.
//
// It is ErrBounds when the message is longer than MessageMax. Each call takes one of
// Config.TransfersMax until its message is acknowledged: ErrFull when all are in use. When ctx ends
// before the message is on its way, it is taken back as by Transfer.Abort, which may cost the
// connection to a peer that does not answer: where only the wait is to end, post a Transfer, too.
func (p *Peer) Notify(ctx context.Context, msg []byte) error {
	t, err := p.e.NewTransfer(p, Write, Route{})
	if err != nil {
		return err
	}
	if err = t.Notify(msg); err == nil {
		var left bool
		if left, err = t.postAndLeave(ctx); left {
			return nil
		}
	}
	if err == nil {
		err = awaitOnce(ctx, t)
	}
	_ = t.Close()
	return err
}

// postAndLeave posts a message alone. Where a backend that sleeps has taken all of it, and it has
// not ended, the transfer is left to its end, which closes it: unless many are, or ctx is over, for
// a caller that does not wait for room is not to use it up.
func (t *Transfer) postAndLeave(ctx context.Context) (left bool, err error) {
	e := t.e
	sleeps := func(c *conn) bool { return c != nil && c.lane.caps.Sleep }
	if ctx.Err() != nil || !slices.ContainsFunc(t.p.conns, sleeps) {
		return false, t.postOnce()
	}
	defer func() {
		if !left {
			e.left.Add(-1)
		}
	}()
	if e.left.Add(1) > int64(e.cfg.TransfersMax/4) {
		return false, t.postOnce()
	}
	var earlier atomic.Bool // what comes first, the end of the post or that it is left, has set it
	_ = t.OnDone(func() {
		if !earlier.CompareAndSwap(false, true) {
			_ = t.Close() // which waits for nothing
			e.left.Add(-1)
		}
	})
	if err := t.postOnce(); err != nil {
		return false, err
	}
	taken := int(t.submitted.Load()) == len(t.batches) && !t.state().has(stopped) &&
		slices.ContainsFunc(t.via(), sleeps) // of several backends one has it
	return taken && earlier.CompareAndSwap(false, true), nil
}

func (t *Transfer) postOnce() error {
	if err := t.Post(); err != nil {
		return fmt.Errorf("notify peer %s: %w", t.p.name, err)
	}
	return nil
}

// acceptedMax is how long a message that the backend has accepted is given to go, where the
// caller does not wait.
const acceptedMax = 20 * time.Millisecond

// awaitOnce waits until a message alone that was posted is on its way, and resets the transfer.
func awaitOnce(ctx context.Context, t *Transfer) error {
	err := t.Wait(ctx)
	if ctx.Err() != nil && !t.Done() && int(t.submitted.Load()) == len(t.batches) {
		soon, cancel := context.WithTimeout(context.Background(), acceptedMax)
		err = t.Wait(soon)
		cancel()
	}
	if ctx.Err() != nil {
		// The message may not be taken back half-way: end it before the transfer
		// is used again.
		_ = t.Abort(context.Background())
		if err = t.Err(); errors.Is(err, ErrAborted) {
			err = fmt.Errorf("notify peer %s: it has no room: %w", t.p.name, ctx.Err())
		}
	}
	_ = t.Reset()
	return err
}

// Receive moves messages that are there into dst and returns how many. It never
// blocks: it is for a goroutine that spins, and takes from the same stream as
// Notifications. A goroutine parked on the channel meanwhile may learn of a
// message up to a millisecond late.
func (e *Engine) Receive(dst []Notification) (n int) {
	for _, l := range e.lanes {
		if !l.notifies() || n == len(dst) {
			continue
		}
		l.spins.Add(1)
		asked := l.received.Load()
		if !l.receiveMu.TryLock() {
			continue // the progress goroutine delivers right now
		}
		n += e.drain(dst[n:]) // messages in the channel are older
		if !l.delivering && n < len(dst) {
			got, _ := l.b.Receive(l.messages[:min(len(dst)-n, len(l.messages))])
			for i := range got {
				var ok bool
				if dst[n], ok = l.dispatch(&l.messages[i]); ok {
					n++
				}
			}
		}
		l.receiveMu.Unlock()
		if l.received.Load() != asked {
			l.receive() // for the goroutine that found the lock taken
		}
	}
	return n
}

func (e *Engine) drain(dst []Notification) (n int) {
	for n < len(dst) {
		select {
		case dst[n] = <-e.inbox:
			n++
		default:
			return n
		}
	}
	return n
}

// Next waits for the next message and returns it. While messages come soon it looks at the backends
// itself, for at most nextSpins times Config.Spin, so that the answer of a quick peer costs no
// wake-up; else it sleeps at once. A message that is there comes before the end of ctx. Next takes
// from the same stream as Notifications. Any goroutine may call it.
func (e *Engine) Next(ctx context.Context) (Notification, error) {
	var one [1]Notification
	if e.Receive(one[:]) > 0 || e.drain(one[:]) > 0 { // the second: by another goroutine, just now
		return one[0], nil
	}
	if ctx.Err() != nil {
		return Notification{}, ctx.Err()
	}
	begin := e.now()
	defer func() { e.pace.add(e.now() - begin) }()
	if most := nextSpins * e.cfg.Spin; e.pace.wait() <= most && slices.ContainsFunc(e.lanes,
		func(l *lane) bool { return l.notifies() && !l.caps.Sleep }) {
		for end := begin + most; e.now() < end; runtime.Gosched() {
			if e.Receive(one[:]) > 0 {
				return one[0], nil
			}
		}
	}
	for _, l := range e.lanes {
		l.park()
		defer l.unpark()
	}
	select {
	case n := <-e.inbox:
		return n, nil
	case <-ctx.Done():
		return Notification{}, ctx.Err()
	case <-e.life.Done():
		return Notification{}, errNextClosed
	}
}

var errNextClosed = fmt.Errorf("await a notification: the engine is closed: %w", ErrClosed)

// nextSpins is how many times as long as Wait a goroutine looks for a message: while both sides
// sleep an answer takes two wake-ups, and a shorter look would never meet one.
const nextSpins = 5

// pace is how long waits for messages last: a mean of which the last has a quarter.
type pace struct{ mean atomic.Int64 }

// paceMax bounds what one wait counts for, so that some ten short ones outweigh an hour.
const paceMax = time.Millisecond

func (p *pace) wait() time.Duration { return time.Duration(p.mean.Load()) }

// add adds a wait. Of two goroutines' at once one may be left out.
func (p *pace) add(d time.Duration) {
	mean := p.mean.Load()
	p.mean.Store(mean + (int64(min(d, paceMax))-mean)/4)
}

// inboxBytes counts the bytes of large notifications in the channel: full of others it takes no
// more than the budget. What has left the channel is known by how many went in and are there.
type inboxBytes struct {
	went atomic.Int64 // into the channel

	mu    sync.Mutex // guards the fields below
	large []largeOne
	bytes int
}

// largeOne is a large notification in the channel. At least so many went in before it.
type largeOne struct {
	number int64
	bytes  int
}

// inboxPause is how long a goroutine waits with a large notification for the program to read.
const inboxPause = 2 * time.Millisecond

func (e *Engine) isLarge(n *Notification) bool {
	return len(n.Data) > e.cfg.NotificationBytes/e.cfg.NotificationsMax
}

// offer puts a notification into the channel. It reports false where there is no room.
func (e *Engine) offer(n Notification) bool {
	if e.isLarge(&n) {
		return e.offerLarge(n)
	}
	select {
	case e.inbox <- n:
		e.inboxed.went.Add(1)
		return true
	default:
		return false
	}
}

// offerLarge is offer within the budget. One alone always goes.
func (e *Engine) offerLarge(n Notification) bool {
	in := &e.inboxed
	in.mu.Lock()
	defer in.mu.Unlock()
	left := in.went.Load() - int64(len(e.inbox)) // at least so many
	for len(in.large) > 0 && in.large[0].number < left {
		in.bytes -= in.large[0].bytes
		in.large = in.large[1:]
	}
	if len(in.large) > 0 && in.bytes+len(n.Data) > e.cfg.NotificationBytes {
		return false
	}
	select {
	case e.inbox <- n:
		in.large = append(in.large, largeOne{in.went.Add(1) - 1, len(n.Data)})
		in.bytes += len(n.Data)
		return true
	default:
		return false
	}
}

// reassembly keeps the parts of long notifications until the last has come. A connection has one at
// a time, of NotifyMax bytes, and those of all connections take most. Where a part has no room, the
// origin that holds most loses a notification: the one that has had no part for longest. Since its
// sender would wait in vain, the connection is lost with it. One notification alone always has
// room.
type reassembly struct {
	most int

	mu    sync.Mutex // guards the fields below
	of    map[*sender]*partial
	bytes int // that they take
	count uint64
}

// partial is the beginning of a notification.
type partial struct {
	data []byte
	last uint64 // of reassembly.count, when its last part came
	lost bool
}

// add adds a part. whole is the notification, once that was the last; an error ends the sender.
func (j *reassembly) add(s *sender, part []byte, limit int) (whole []byte, ok bool, err error) {
	if len(part) == 0 {
		return nil, false, nil
	}
	flags, data := part[0], part[1:]
	j.mu.Lock()
	defer j.mu.Unlock()
	if p := j.of[s]; p != nil && p.lost {
		return nil, false, fmt.Errorf("notifications that are under way take Config."+
			"NotificationBytes of %d, raise it: %w: %w", j.most, ErrFull, ErrPeerLost)
	}
	if flags&wire.FirstPart != 0 {
		j.drop(s)
		if j.of == nil {
			j.of = map[*sender]*partial{}
		}
		j.of[s] = &partial{}
	}
	p := j.of[s]
	if p == nil || len(p.data)+len(data) > limit {
		j.drop(s)
		return nil, false, nil
	}
	j.count++
	p.last = j.count
	before := cap(p.data)
	p.data = append(p.data, data...)
	j.bytes += cap(p.data) - before
	if flags&wire.LastPart != 0 {
		whole = p.data
		j.drop(s)
		return whole, true, nil
	}
	for j.bytes > j.most && j.holders() > 1 {
		v := j.of[j.victim()]
		j.bytes -= cap(v.data)
		v.data, v.lost = nil, true
	}
	return nil, false, nil
}

// holders counts those that hold anything.
func (j *reassembly) holders() (n int) {
	for _, p := range j.of {
		if !p.lost {
			n++
		}
	}
	return n
}

// victim is the sender that loses its notification.
func (j *reassembly) victim() (victim *sender) {
	bytes := map[string]int{}
	for s, p := range j.of {
		bytes[s.origin()] += cap(p.data)
	}
	for s, p := range j.of {
		if p.lost {
			continue
		}
		if victim != nil {
			a, b := bytes[s.origin()], bytes[victim.origin()]
			if a < b || a == b && p.last > j.of[victim].last {
				continue
			}
		}
		victim = s
	}
	return victim
}

// drop forgets the parts of a notification that have come.
// Preconditions: j.mu is held.
func (j *reassembly) drop(s *sender) {
	if p := j.of[s]; p != nil {
		j.bytes -= cap(p.data)
		delete(j.of, s)
	}
}

// forget is drop for a sender that has ended.
func (j *reassembly) forget(s *sender) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.drop(s)
}

// origin says with which other senders this one has a share of a bound.
func (s *sender) origin() string {
	if s.ticket == nil {
		return noTicket
	}
	return s.ticket.origin
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// Notification is a message from a peer, delivered after the data that it came
// with is visible here.
type Notification struct {
	Peer    *Peer  // nil: this engine has not connected to the sender
	Backend string // that carried it
	From    string // address of the sending backend: the same for all its messages
	Data    []byte // the receiver's to keep
	Err     error  // ErrPeerLost: the last word about this sender; Data is nil
}

// Notifications is where a goroutine waits for messages. The channel is never
// closed: also wait for an end of your own. Messages of one peer over one backend
// arrive in the order in which their transfers were posted, that of a transfer
// of several batches when its last batch went. When nobody reads, the channel
// fills, then the senders' transfers wait and end with ErrTimeout.
func (e *Engine) Notifications() <-chan Notification { return e.inbox }

// Receive moves messages that are there into dst and returns how many. It never
// blocks: it is for a goroutine that spins, and takes from the same stream as
// Notifications. A goroutine parked on the channel meanwhile may learn of a
// message up to a millisecond late.
func (e *Engine) Receive(dst []Notification) (n int) {
	for _, l := range e.lanes {
		if l.receiver == nil || n == len(dst) {
			continue
		}
		l.spins.Add(1)
		asked := l.received.Load()
		if !l.receiveMu.TryLock() {
			continue // the progress goroutine delivers right now
		}
		n += e.drain(dst[n:]) // what the channel has is older
		if !l.relief && n < len(dst) {
			got, _ := l.receiver.Receive(l.messages[:min(len(dst)-n, len(l.messages))])
			for i := range got {
				if e.stager.takes(l, &l.messages[i]) {
					continue
				}
				dst[n] = l.notification(&l.messages[i])
				n++
			}
		}
		l.receiveMu.Unlock()
		if l.received.Load() != asked {
			l.receive() // for who found us at it
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

// receive moves the backend's messages into the channel. When that is full a
// goroutine waits for room, and the rest stays with the backend, which holds
// back the senders. Who finds another at it leaves word, as in poll.
func (l *lane) receive() (found bool) {
	if l.receiver == nil {
		return false
	}
	l.received.Add(1)
	for l.receiveMu.TryLock() {
		asked := l.received.Load()
		found = l.deliver() || found
		l.receiveMu.Unlock()
		if l.received.Load() == asked {
			break
		}
	}
	return found
}

// deliver is receive's part under the lock.
// Preconditions: l.receiveMu is held.
func (l *lane) deliver() (found bool) {
	for !l.relief {
		n, _ := l.receiver.Receive(l.messages[:])
		for i := range n {
			if l.e.stager.takes(l, &l.messages[i]) {
				continue
			}
			note := l.notification(&l.messages[i])
			select {
			case l.e.inbox <- note:
			default:
				l.relieve(note, l.messages[i+1:n])
				return true
			}
		}
		if n == 0 {
			return found
		}
		found = true
	}
	return found
}

// relieve waits for room in a goroutine of its own.
// Preconditions: l.receiveMu is held.
func (l *lane) relieve(first Notification, rest []driver.Message) {
	l.relief = true
	notes := []Notification{first}
	for i := range rest {
		if l.e.stager.takes(l, &rest[i]) {
			continue
		}
		notes = append(notes, l.notification(&rest[i]))
	}
	l.e.running.Add(1)
	go func() {
		defer l.e.running.Done()
		for _, n := range notes {
			select {
			case l.e.inbox <- n:
			case <-l.e.closing:
				return
			}
		}
		l.receiveMu.Lock()
		l.relief = false
		l.receiveMu.Unlock()
		l.receive()
	}()
}

func (l *lane) notification(m *driver.Message) Notification {
	n := Notification{Backend: l.caps.Name, From: m.From, Data: m.Data, Err: m.Err}
	m.Data = nil
	if p, ok := l.senders.Load(m.From); ok {
		n.Peer = p.(*Peer)
		// Where the backend watches, a last word is no news of our own connection:
		// the sender may have had two to us and closed one. A Peer that Serve made
		// ends with the one that the dialler has closed.
		if c := n.Peer.conns[l.index]; m.Err != nil && (c.watcher == nil || n.Peer.served.Load()) {
			c.lose()
		}
	}
	return n
}

// notifyTransfersMax is how many Notify calls to one peer run at once. Their
// transfers are made when first needed.
const notifyTransfersMax = 4

// MessageMax returns how many bytes a message to the peer may have at most, by any
// of the backends that connect it and carry messages; 0 when none does.
func (p *Peer) MessageMax() int {
	limit := 0
	for _, c := range p.conns {
		if c != nil && c.notifier != nil && (limit == 0 || c.lane.caps.MessageMax < limit) {
			limit = c.lane.caps.MessageMax
		}
	}
	return limit
}

// Notify sends a message without data and returns when it is on its way. It is
// ErrBounds when the message is longer than the route's limit.
func (p *Peer) Notify(ctx context.Context, msg []byte) error {
	var t *Transfer
	select {
	case t = <-p.notifiers:
	case <-p.lost:
		return &OpError{Op: "notify", Peer: p.name, Err: ErrPeerLost}
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { p.returnNotifier(t) }()
	if t == nil {
		var err error
		if t, err = p.e.NewTransfer(p, Write, Route{}); err != nil {
			return err
		}
	}
	return notifyOnce(ctx, t, msg)
}

func (p *Peer) returnNotifier(t *Transfer) {
	if t != nil && t.unproven.Load() {
		_ = t.Close()
		t = nil // the next one is made anew
	}
	p.notifiers <- t
	p.mu.Lock()
	closed := p.closed
	p.mu.Unlock()
	if closed {
		p.closeNotifiers() // Close did not find it
	}
}

func notifyOnce(ctx context.Context, t *Transfer, msg []byte) error {
	if err := t.Notify(msg); err != nil {
		return err
	}
	if err := t.Post(); err != nil {
		return fmt.Errorf("notify peer %s: %w", t.p.name, err)
	}
	err := t.Wait(ctx)
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

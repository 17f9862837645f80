// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
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
	if !l.notifies() {
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
	for !l.delivering {
		n, _ := l.b.Receive(l.messages[:])
		for i := range n {
			first, ok := l.take(&l.messages[i])
			if !ok {
				continue
			}
			if !l.e.offer(first) {
				l.deliverLater(first, l.messages[i+1:n])
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

// deliverLater waits for room in a goroutine of its own.
// Preconditions: l.receiveMu is held.
func (l *lane) deliverLater(first Notification, rest []driver.Message) {
	l.delivering = true
	notes := []Notification{first}
	for i := range rest {
		if n, ok := l.take(&rest[i]); ok {
			notes = append(notes, n)
		}
	}
	l.e.running.Add(1)
	go func() {
		defer l.e.running.Done()
		for _, n := range notes {
			if !l.e.put(n) {
				return
			}
		}
		l.receiveMu.Lock()
		l.delivering = false
		l.receiveMu.Unlock()
		l.receive()
	}()
}

// notifyTransfersMax is how many Notify calls to one peer run at once. Their
// transfers are made when first needed.
const notifyTransfersMax = 4

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

// Notify sends a message without data and returns when it is on its way. It is
// ErrBounds when the message is longer than MessageMax. When ctx ends first the message is taken
// back as by Transfer.Abort, which may cost the connection to a peer that does not answer: where
// only the wait is to end, post a Transfer that has a message alone.
func (p *Peer) Notify(ctx context.Context, msg []byte) error {
	t, err := p.takeNotifier(ctx)
	if err != nil {
		return err
	}
	defer func() { p.returnNotifier(t) }()
	if t == nil {
		if t, err = p.e.NewTransfer(p, Write, Route{}); err != nil {
			return err
		}
	}
	return notifyOnce(ctx, t, msg)
}

// takeNotifier returns a transfer for a message, nil for one that is to be made. It does not
// wait where one is free, also when the context is over.
func (p *Peer) takeNotifier(ctx context.Context) (*Transfer, error) {
	select {
	case <-p.lost:
		return nil, &OpError{Op: "notify", Peer: p.name, Err: ErrPeerLost}
	default:
	}
	select {
	case t := <-p.notifiers:
		return t, nil
	default:
	}
	select {
	case t := <-p.notifiers:
		return t, nil
	case <-p.lost:
		return nil, &OpError{Op: "notify", Peer: p.name, Err: ErrPeerLost}
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (p *Peer) returnNotifier(t *Transfer) {
	if t != nil && t.isUnproven() {
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
	return postOnce(ctx, t)
}

// acceptedMax is how long a message that the backend has accepted is given to go, where the
// caller does not wait.
const acceptedMax = 20 * time.Millisecond

// postOnce posts a message alone, waits until it is on its way, and resets the transfer.
func postOnce(ctx context.Context, t *Transfer) error {
	if err := t.Post(); err != nil {
		return fmt.Errorf("notify peer %s: %w", t.p.name, err)
	}
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

// SPDX-License-Identifier: Apache-2.0

package main

// #include "faces.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/proc"
)

// inbox is the way of messages to the program: from the engine's channel or, once a
// descriptor was asked for, from a queue that a goroutine moves them into.
type inbox struct {
	turn   chan struct{} // a lock, full while a thread receives
	cached atomic.Bool   // a cache or hand-over has the turn

	// Guarded by turn.
	found [16]engine.Notification // by one look at the backends
	ahead []engine.Notification   // those of them that no caller has yet
	full  bool                    // more may have come than that look has found
	queue chan engine.Notification
	wake  *proc.Event
	moved chan struct{} // closed when that goroutine has ended
}

// queueLength is how many messages wait beside the engine's channel.
const queueLength = 64

func (in *inbox) init() { in.turn = make(chan struct{}, 1) }

// reserve gives the messages of the engine to a cache or to hand-over, until unreserve: the turn is
// its own.
func (in *inbox) reserve() error {
	select {
	case in.turn <- struct{}{}:
	default:
		return fmt.Errorf("a cache, a hand-over or a thread has the messages of this engine: open "+
			"another engine: %w", engine.ErrBusy)
	}
	if in.wake != nil {
		<-in.turn
		return fmt.Errorf("the program has the descriptor of this engine's messages: open another "+
			"engine: %w", engine.ErrBusy)
	}
	in.cached.Store(true)
	return nil
}

func (in *inbox) unreserve() {
	in.cached.Store(false)
	<-in.turn
}

// updateDescriptor makes the descriptor readable if and only if there is something, but for
// what comes meanwhile.
// Preconditions: the turn is ours.
func (in *inbox) updateDescriptor() {
	if in.wake == nil {
		return
	}
	if !in.more() {
		in.wake.Drain()
	}
	if in.more() {
		_ = in.wake.Signal()
	}
}

func (in *inbox) more() bool { return len(in.ahead) > 0 || len(in.queue) > 0 }

// fillQueue brings messages from the engine's channel into the queue.
func (in *inbox) fillQueue(e *openEngine) {
	defer close(in.moved)
	for {
		select {
		case n := <-e.Notifications():
			select {
			case in.queue <- n:
				_ = in.wake.Signal()
			case <-e.gone:
				return
			}
		case <-e.gone:
			return
		}
	}
}

// close ends it. The engine is gone by now.
func (in *inbox) close() error {
	in.turn <- struct{}{}
	defer func() { <-in.turn }()
	if in.wake == nil {
		return nil
	}
	<-in.moved
	return in.wake.Close()
}

//export slgoNotificationFd
func slgoNotificationFd(h C.uint64_t, fd *C.int, f *C.struct_slgo_fault) C.int {
	e, err := engines.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	n, err := e.inbox.descriptor(e)
	if err != nil {
		return answer(f, fmt.Errorf("notification descriptor: %w", err))
	}
	*fd = C.int(n)
	return C.SLUICE_OK
}

// descriptor makes it at first.
func (in *inbox) descriptor(e *openEngine) (int, error) {
	select {
	case in.turn <- struct{}{}:
	default:
		return -1, fmt.Errorf("a thread receives: ask before, or when it has returned: %w",
			engine.ErrBusy)
	}
	defer func() { <-in.turn }()
	if in.wake == nil {
		if err := in.open(e); err != nil {
			return -1, err
		}
		in.updateDescriptor()
	}
	if fd := in.wake.FD(); fd >= 0 {
		return fd, nil
	}
	return -1, engine.ErrClosed
}

// open starts the goroutine behind a descriptor.
func (in *inbox) open(e *openEngine) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.over {
		return engine.ErrClosed
	}
	wake, err := proc.NewEvent()
	if err != nil {
		return err
	}
	in.wake, in.queue, in.moved = wake, make(chan engine.Notification, queueLength),
		make(chan struct{})
	go in.fillQueue(e)
	return nil
}

//export slgoReceive
func slgoReceive(h C.uint64_t, out *C.struct_sluice_notification, buffer *C.uint8_t,
	capacity C.size_t, timeout C.int64_t, f *C.struct_slgo_fault) C.int {
	e, err := engines.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	in := &e.inbox
	if in.cached.Load() {
		return answer(f, fmt.Errorf("a cache or a hand-over has the messages of this engine: "+
			"open another engine for others: %w", engine.ErrBusy))
	}
	ctx, cancel := within(timeout)
	defer cancel()
	select {
	case in.turn <- struct{}{}: // also when the time is over already
	default:
		select {
		case in.turn <- struct{}{}:
		case <-ctx.Done():
			return C.SLUICE_PENDING
		case <-e.gone:
			return answer(f, errReceiveClosed)
		}
	}
	defer func() { <-in.turn }()
	defer in.updateDescriptor()
	if timeout == 0 {
		in.receiveNow(e)
	} else if err := in.await(ctx, e); err != nil {
		return answer(f, err)
	}
	if len(in.ahead) == 0 {
		return C.SLUICE_PENDING
	}
	return e.deliver(out, buffer, capacity, f)
}

// receiveNow has the engine give the inbox the messages that have come by now.
// Preconditions: the turn is ours.
func (in *inbox) receiveNow(e *openEngine) {
	if len(in.ahead) > 0 {
		return
	}
	var from <-chan engine.Notification = in.queue
	if from == nil {
		if n := e.Receive(in.found[:]); n > 0 {
			in.ahead, in.full = in.found[:n], n > 1
			return
		}
		from = e.Notifications() // which another goroutine has filled just now
	}
	select {
	case in.found[0] = <-from:
		in.ahead, in.full = in.found[:1], true
	default:
	}
}

// await waits until the engine has given a message; none ahead: it gave none in time. A message
// that has come goes before a time that is over.
// Preconditions: the turn is ours.
func (in *inbox) await(ctx context.Context, e *openEngine) error {
	if len(in.ahead) > 0 {
		return nil
	}
	n, err := in.nextMessage(ctx, e)
	switch {
	case err == nil:
		in.found[0] = n
		in.ahead, in.full = in.found[:1], true
	case errors.Is(err, engine.ErrClosed):
		return errReceiveClosed
	}
	return nil
}

// nextMessage is Engine.Next or, where a descriptor was asked for, takes from the queue.
// Preconditions: the turn is ours.
func (in *inbox) nextMessage(ctx context.Context, e *openEngine) (engine.Notification, error) {
	if in.queue == nil {
		return e.Next(ctx)
	}
	select {
	case n := <-in.queue:
		return n, nil
	default:
	}
	select {
	case n := <-in.queue:
		return n, nil
	case <-e.gone:
		return engine.Notification{}, errReceiveClosed
	case <-ctx.Done():
		return engine.Notification{}, ctx.Err()
	}
}

var errReceiveClosed = fmt.Errorf("receive: the engine was closed: %w", engine.ErrClosed)

// deliver has the inbox give the program the first message that is ahead.
// Preconditions: the turn is ours.
func (e *openEngine) deliver(out *C.struct_sluice_notification, buffer *C.uint8_t,
	capacity C.size_t, f *C.struct_slgo_fault) C.int {
	in := &e.inbox
	n := in.ahead[0]
	out.length = C.uint64_t(len(n.Data))
	var length C.size_t
	if code := hand(n.Data, buffer, capacity, &length, f); code != C.SLUICE_OK {
		return code
	}
	in.ahead[0] = engine.Notification{}
	in.ahead = in.ahead[1:]
	out.status, out.peer = C.SLUICE_OK, 0
	if n.Err != nil {
		out.status = C.int32_t(codeOf(n.Err))
	}
	if n.Peer != nil {
		out.peer = C.uint64_t(e.senderHandle(n.Peer))
	}
	if out.size >= C.sizeof_struct_sluice_notification { // else the program is older than the field
		out.more = 0
		if in.full || in.more() {
			out.more = 1
		}
	}
	return C.SLUICE_OK
}

//export slgoNotify
func slgoNotify(h C.uint64_t, message *C.uint8_t, length C.size_t, timeout C.int64_t,
	f *C.struct_slgo_fault) C.int {
	p, err := peers.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	b, err := inPlace[byte](message, min(uint64(length), math.MaxInt), "message")
	if err != nil {
		return answer(f, err)
	}
	if limit := p.p.MessageMax(); len(b) > limit {
		return answer(f, fmt.Errorf("message of %d bytes, at most %d to this peer: %w", len(b),
			limit, engine.ErrBounds))
	}
	ctx, cancel := within(timeout)
	defer cancel()
	return answer(f, p.p.Notify(ctx, append([]byte{}, b...)))
}

// SPDX-License-Identifier: Apache-2.0

package main

// #include "faces.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/engine"
)

var errNotPosted = fmt.Errorf("the transfer was not posted: %w", engine.ErrBusy)

//export slgoTest
func slgoTest(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	t, err := transfers.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	return t.test(f)
}

// test returns SLUICE_PENDING, the outcome of a transfer that has ended, or errNotPosted. It copies
// one piece along.
func (t *transfer) test(f *C.struct_slgo_fault) C.int {
	if t.t.Advance() {
		return answer(f, t.t.Err())
	}
	if t.t.Err() == engine.ErrBusy {
		return C.SLUICE_PENDING
	}
	if t.t.Done() { // it has ended since the first look
		return answer(f, t.t.Err())
	}
	return answer(f, errNotPosted)
}

//export slgoWait
func slgoWait(h C.uint64_t, timeout C.int64_t, f *C.struct_slgo_fault) C.int {
	t, err := transfers.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	return t.wait(timeout, f)
}

// slgoPostAndWait is one call for a post and a wait, because a small copy is fastest if the waiting
// thread makes it itself. Between two calls the thread would run C code, and Go would give its
// processor to a goroutine of the backend, which would begin the copy first.
//
//export slgoPostAndWait
func slgoPostAndWait(h C.uint64_t, timeout C.int64_t, f *C.struct_slgo_fault) C.int {
	t, err := hold(h)
	if err != nil {
		return answer(f, err)
	}
	err = t.t.Post()
	t.release()
	if err != nil {
		return answer(f, err)
	}
	return t.wait(timeout, f)
}

//export slgoSend
func slgoSend(h C.uint64_t, message *C.uint8_t, length C.size_t, timeout C.int64_t,
	f *C.struct_slgo_fault) C.int {
	t, err := hold(h)
	if err != nil {
		return answer(f, err)
	}
	if err = t.setMessage(message, length); err == nil {
		err = t.t.Post()
	}
	t.release()
	if err != nil {
		return answer(f, err)
	}
	return t.wait(timeout, f)
}

func (t *transfer) wait(timeout C.int64_t, f *C.struct_slgo_fault) C.int {
	if timeout == 0 || t.t.Done() {
		return t.test(f)
	}
	if timeout < 0 {
		return answer(f, t.t.Wait(context.Background()))
	}
	ctx := acquireDeadline(time.Duration(timeout))
	err := t.t.Wait(ctx)
	ctx.release()
	if err == errWaitOver {
		return C.SLUICE_PENDING
	}
	return answer(f, err)
}

// errWaitOver says that a wait has reached its limit, while the transfer goes on.
var errWaitOver = errors.New("the time for this wait is over")

// deadlineContext is a context that ends after a time. It is used again, so that waiting allocates
// nothing.
type deadlineContext struct {
	timer *time.Timer
	done  chan struct{}
	over  atomic.Bool
}

// freeDeadlines are contexts that no wait uses. If there is none, a wait makes another one.
var freeDeadlines = make(chan *deadlineContext, 64)

func acquireDeadline(d time.Duration) *deadlineContext {
	select {
	case l := <-freeDeadlines:
		l.timer.Reset(d)
		return l
	default:
	}
	l := &deadlineContext{done: make(chan struct{})}
	l.timer = time.AfterFunc(d, func() {
		l.over.Store(true)
		close(l.done)
	})
	return l
}

// release keeps the context for a later wait, unless it has ended.
func (l *deadlineContext) release() {
	if !l.timer.Stop() {
		return
	}
	select {
	case freeDeadlines <- l:
	default:
	}
}

// Deadline implements context.Context; nothing here asks for it.
func (l *deadlineContext) Deadline() (time.Time, bool) { return time.Time{}, false }

// Done implements context.Context.
func (l *deadlineContext) Done() <-chan struct{} { return l.done }

// Err implements context.Context.
func (l *deadlineContext) Err() error {
	if l.over.Load() {
		return errWaitOver
	}
	return nil
}

// Value implements context.Context; there are none.
func (l *deadlineContext) Value(any) any { return nil }

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

var errIdle = fmt.Errorf("the transfer was not posted: %w", engine.ErrBusy)

//export slgoTest
func slgoTest(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	t, err := transfers.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	return t.test(f)
}

// test is SLUICE_PENDING, the outcome, or what is wrong with asking.
func (t *transfer) test(f *C.struct_slgo_fault) C.int {
	if t.t.Done() {
		return answer(f, t.t.Err())
	}
	if t.t.Err() == engine.ErrBusy {
		return C.SLUICE_PENDING
	}
	if t.t.Done() { // just now
		return answer(f, t.t.Err())
	}
	return answer(f, errIdle)
}

//export slgoWait
func slgoWait(h C.uint64_t, timeout C.int64_t, f *C.struct_slgo_fault) C.int {
	t, err := transfers.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	return t.wait(timeout, f)
}

// slgoPostAndWait keeps the processor between the two: what runs in C has left it, and then
// a goroutine of the backend's takes the copy over before the caller asks for it.
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

func (t *transfer) wait(timeout C.int64_t, f *C.struct_slgo_fault) C.int {
	if timeout == 0 || t.t.Done() {
		return t.test(f)
	}
	if timeout < 0 {
		return answer(f, t.t.Wait(context.Background()))
	}
	d := borrowLimit(time.Duration(timeout))
	err := t.t.Wait(d)
	d.putBack()
	if err == errOver {
		return C.SLUICE_PENDING
	}
	return answer(f, err)
}

// errOver is the end of a wait, as opposed to that of what is waited for.
var errOver = errors.New("the time for this wait is over")

// limit is a context that ends after a time and is used again, so that waiting
// allocates nothing.
type limit struct {
	timer *time.Timer
	done  chan struct{}
	over  atomic.Bool
}

// limits are the unused ones. Threads that wait beyond their number make more.
var limits = make(chan *limit, 64)

func borrowLimit(d time.Duration) *limit {
	select {
	case l := <-limits:
		l.timer.Reset(d)
		return l
	default:
	}
	l := &limit{done: make(chan struct{})}
	l.timer = time.AfterFunc(d, func() {
		l.over.Store(true)
		close(l.done)
	})
	return l
}

// putBack keeps it for the next waiter, unless its time has come.
func (l *limit) putBack() {
	if !l.timer.Stop() {
		return
	}
	select {
	case limits <- l:
	default:
	}
}

// Deadline implements context.Context; nothing here asks for it.
func (l *limit) Deadline() (time.Time, bool) { return time.Time{}, false }

// Done implements context.Context.
func (l *limit) Done() <-chan struct{} { return l.done }

// Err implements context.Context.
func (l *limit) Err() error {
	if l.over.Load() {
		return errOver
	}
	return nil
}

// Value implements context.Context; there are none.
func (l *limit) Value(any) any { return nil }

// SPDX-License-Identifier: Apache-2.0

package main

// #include "faces.h"
import "C"

import (
	"fmt"
	"slices"
	"sync"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/proc"
)

// endings are the watched transfers that have ended and that the program was not told of. A
// transfer is in it once at most, so the engine's transfers bound it.
type endings struct {
	mu     sync.Mutex // guards what follows
	list   []*transfer
	wake   *proc.Event // nil until the program asks for the descriptor
	closed bool
}

// add is called by the goroutine that ended a transfer: it does not block.
func (q *endings) add(t *transfer) {
	if t.queued.Swap(true) {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed || t.closed {
		return
	}
	q.list = append(q.list, t)
	if len(q.list) == 1 && q.wake != nil {
		_ = q.wake.Signal()
	}
}

// descriptor makes it at first.
func (q *endings) descriptor() (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return -1, engine.ErrClosed
	}
	if q.wake == nil {
		wake, err := proc.NewEvent()
		if err != nil {
			return -1, err
		}
		q.wake = wake
		if len(q.list) > 0 {
			_ = wake.Signal()
		}
	}
	return q.wake.FD(), nil
}

// moveTo moves the first of them into dst. The descriptor stays readable while some are left.
func (q *endings) moveTo(dst []C.struct_sluice_completion) (n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	n = min(len(dst), len(q.list))
	for i, t := range q.list[:n] {
		t.queued.Store(false) // before its state is looked at: what ends from here on is added anew
		dst[i] = C.struct_sluice_completion{transfer: C.uint64_t(t.handle),
			word: C.uint64_t(t.word.Load())}
		dst[i].status = C.int32_t(t.status())
	}
	rest := copy(q.list, q.list[n:])
	clear(q.list[rest:])
	q.list = q.list[:rest]
	if rest == 0 && q.wake != nil {
		q.wake.Drain()
	}
	return n
}

// status does not poll, which might end another transfer and add it.
func (t *transfer) status() C.int {
	switch err := t.t.Err(); err {
	case nil:
		return C.SLUICE_OK
	case engine.ErrBusy:
		return C.SLUICE_PENDING
	default:
		return codeOf(err)
	}
}

// forget takes out a transfer that is closed, for good.
func (q *endings) forget(t *transfer) {
	q.mu.Lock()
	defer q.mu.Unlock()
	t.closed = true
	if i := slices.Index(q.list, t); i >= 0 {
		q.list = slices.Delete(q.list, i, i+1)
	}
}

func (q *endings) close() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed, q.list = true, nil
	if q.wake == nil {
		return nil
	}
	return q.wake.Close()
}

//export slgoTransferWatch
func slgoTransferWatch(h, word C.uint64_t, f *C.struct_slgo_fault) C.int {
	t, err := hold(h)
	if err != nil {
		return answer(f, err)
	}
	defer t.release()
	if err := t.t.OnDone(func() { t.of.ended.add(t) }); err != nil {
		return answer(f, err)
	}
	t.word.Store(uint64(word))
	return C.SLUICE_OK
}

//export slgoCompletionFd
func slgoCompletionFd(h C.uint64_t, fd *C.int, f *C.struct_slgo_fault) C.int {
	e, err := engines.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	n, err := e.ended.descriptor()
	if err != nil {
		return answer(f, fmt.Errorf("completion descriptor: %w", err))
	}
	*fd = C.int(n)
	return C.SLUICE_OK
}

//export slgoCompletions
func slgoCompletions(h C.uint64_t, list *C.struct_sluice_completion, most C.size_t, count *C.size_t,
	f *C.struct_slgo_fault) C.int {
	e, err := engines.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	dst, err := inPlace[C.struct_sluice_completion](list, uint64(most), "list")
	if err != nil {
		return answer(f, err)
	}
	*count = C.size_t(e.ended.moveTo(dst))
	return C.SLUICE_OK
}

// SPDX-License-Identifier: Apache-2.0

package main

// #include "faces.h"
import "C"

import (
	"sync"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/proc"
)

// ending is the end of what a goroutine does for the program, which waits for it or polls.
type ending struct {
	done chan struct{} // closed by tell

	mu     sync.Mutex  // guards what follows
	wake   *proc.Event // nil until the program asks for the descriptor
	closed bool
}

func newEnding() ending { return ending{done: make(chan struct{})} }

// tell is called once, when the outcome is there.
func (e *ending) tell() {
	e.mu.Lock()
	defer e.mu.Unlock()
	close(e.done)
	if e.wake != nil {
		_ = e.wake.Signal()
	}
}

// within reports whether the end comes within a timeout.
func (e *ending) within(timeout C.int64_t) bool {
	if isClosed(e.done) == 1 {
		return true
	}
	over, stop := after(timeout)
	defer stop()
	select {
	case <-e.done:
		return true
	case <-over:
		return false
	}
}

// descriptor makes it at first. Nothing drains it: it stays readable from the end on.
func (e *ending) descriptor() (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return -1, engine.ErrClosed
	}
	if e.wake == nil {
		wake, err := proc.NewEvent()
		if err != nil {
			return -1, err
		}
		e.wake = wake
		if isClosed(e.done) == 1 {
			_ = wake.Signal()
		}
	}
	return e.wake.FD(), nil
}

// closeWake also wakes those that watch a duplicate, who are told then that the handle is stale.
func (e *ending) closeWake() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.closed = true
	if e.wake != nil {
		_ = e.wake.Signal()
		_ = e.wake.Close()
	}
}

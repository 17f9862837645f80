// SPDX-License-Identifier: Apache-2.0

package session

import (
	"sync"
	"sync/atomic"
	"testing"
)

// TestGate has many use what one closes: none is inside once Wait has returned.
func TestGate(t *testing.T) {
	var g Gate
	var closed atomic.Bool
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for g.Enter() {
				if closed.Load() {
					t.Error("inside after Wait")
				}
				g.Exit()
			}
		})
	}
	if !g.Shut() || g.Shut() || !g.IsShut() {
		t.Error("Shut must report which call was first")
	}
	g.Wait()
	closed.Store(true)
	wg.Wait()
	g.Reopen()
	if !g.Enter() {
		t.Error("a gate that was opened again is shut")
	}
}

func TestTasks(t *testing.T) {
	var tasks Tasks
	var ran atomic.Int32
	hold := make(chan struct{})
	for range 3 {
		if !tasks.Start(func() { <-hold; ran.Add(1) }) {
			t.Error("a task does not start")
		}
	}
	close(hold)
	tasks.Wait()
	if ran.Load() != 3 || tasks.Start(func() { ran.Add(1) }) {
		t.Errorf("%d tasks ran before Wait returned, or one started after", ran.Load())
	}
}

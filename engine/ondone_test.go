// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/sluicehq/sluice/internal/testing/allocs"
)

// TestOnDone counts the calls, one for each post, also of one that fails.
func TestOnDone(t *testing.T) {
	p, src, m, _ := pair(t, 1<<20)
	tr := transfer(t, p, Write)
	check(t, tr.Add(src, 0, m, 0, 1<<20))
	told := make(chan bool, 16)
	check(t, tr.OnDone(func() { told <- tr.Done() }))
	for range 3 {
		check(t, tr.Post())
		check(t, tr.Wait(context.Background()))
		select {
		case done := <-told:
			if !done {
				t.Error("told of a transfer that is not done")
			}
		case <-time.After(10 * time.Second):
			t.Fatal("nobody was told")
		}
	}
	check(t, tr.OnDone(nil))
	check(t, tr.Post())
	check(t, tr.Wait(context.Background()))
	if len(told) != 0 {
		t.Error("told once more than posted")
	}
	if n := allocs.PerRun(10, func() { _ = tr.OnDone(nil) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestOnDoneWhilePosted: the hook belongs to the post that is under way.
func TestOnDoneWhilePosted(t *testing.T) {
	p, src, m, _ := pair(t, 1<<20)
	tr := transfer(t, p, Write)
	check(t, tr.Add(src, 0, m, 0, 1<<20))
	check(t, tr.OnDone(func() {}))
	tr.word.Store(uint64(posted))
	err := tr.OnDone(nil)
	tr.word.Store(uint64(idle))
	if !errors.Is(err, ErrBusy) {
		t.Error("changed the hook of a transfer that is posted")
	}
}

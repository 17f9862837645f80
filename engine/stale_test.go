// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestAbortOfWhatIsJustSubmitted aborts while Submit runs: the backend does not
// know the tag yet and ignores the first Cancel.
func TestAbortOfWhatIsJustSubmitted(t *testing.T) {
	f := &fake{manual: true}
	var once sync.Once
	submitting, aborting := make(chan struct{}), make(chan struct{})
	f.onSubmit = func(int, driver.Op, uint64, bool) error {
		close(submitting)
		<-aborting
		return nil
	}
	f.onCancel = func(tag uint64) {
		f.drop(tag, ErrAborted)
		once.Do(func() { close(aborting) })
	}
	p, r, m := overFake(t, f, limit)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, m, 1)
	posted := make(chan error)
	go func() { posted <- tr.Post() }()
	<-submitting
	check(t, tr.Abort(within(t)))
	check(t, <-posted)
	require.ErrorIs(t, tr.Err(), ErrAborted, "outcome")
	select {
	case <-p.Lost():
		t.Error("the connection was closed though the batch could be cancelled")
	default:
	}
}

// TestAbortGraceBeginsAtAbort looks at the stage: the next step of the sweeper is
// to close the connection, not to cancel once more.
func TestAbortGraceBeginsAtAbort(t *testing.T) { testkit.InVirtualTime(t, abortGraceBeginsAtAbort) }

func abortGraceBeginsAtAbort(t *testing.T) {
	f := &fake{manual: true}
	p, r, m := overFake(t, f, time.Hour)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, m, 1)
	check(t, tr.Post())
	over, cancel := context.WithCancel(context.Background())
	cancel()
	for range 3 {
		require.ErrorIs(t, tr.Abort(over), context.Canceled, "abort")
		if left := time.Duration(tr.deadline.Load()) - p.e.now(); !tr.state().has(cancelled) ||
			tr.state().has(severed) || left > limit {
			t.Errorf("state %b, for another %v", tr.state(), left)
		}
	}
	f.finishOne(driver.ErrAborted)
	require.ErrorIs(t, tr.Wait(within(t)), ErrAborted, "outcome")
}

// TestAbortTooLate has every batch succeed all the same: so has the transfer, and what was to
// follow the data has followed.
func TestAbortTooLate(t *testing.T) {
	f := &fake{manual: true}
	p, r, m := overFake(t, f, time.Hour)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, m, 1)
	for _, outcome := range []error{nil, driver.ErrAborted, nil} {
		check(t, tr.Post())
		f.onCancel = func(uint64) { f.finishOne(outcome) }
		check(t, tr.Abort(within(t)))
		require.ErrorIs(t, tr.Err(), outcome, "outcome, the backend's")
	}
}

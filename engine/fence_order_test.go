// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestLeaseThatIsRefusedLeavesNothing, though a backend keeps its part of the memory at first: the
// engine asks again, and the region is not closed before.
func TestLeaseThatIsRefusedLeavesNothing(t *testing.T) {
	testkit.InVirtualTime(t, func(t *testing.T) {
		kept, revoked := false, 0
		e := open(t, "a", func(c *Config) {
			c.LeasesMax = 1
			c.Backends = []driver.Backend{&fake{onRevoke: func(context.Context) error {
				if kept {
					return ErrBusy
				}
				revoked++
				return nil
			}}}
		})
		r := register(t, e, "kv", 4096)
		l, err := r.Lease(0, 1, LeaseOptions{})
		require.NoError(t, err)
		kept = true
		_, err = r.Lease(0, 1, LeaseOptions{})
		require.ErrorIs(t, err, ErrFull)
		kept = false
		require.NoError(t, l.Revoke(t.Context()))
		require.NoError(t, r.Close())
		require.Equal(t, 3, revoked, "memories, when the region is closed")
	})
}

// TestCloseAfterAFailedClose: of two backends one keeps the memory at first. The next Close asks
// that one alone, as the other's key may be another memory's by then.
func TestCloseAfterAFailedClose(t *testing.T) {
	var asked [2]int
	kept := false
	e := open(t, "a", func(c *Config) {
		c.Backends = []driver.Backend{
			&fake{name: "one", onRevoke: func(context.Context) error { asked[0]++; return nil }},
			&fake{name: "two", onRevoke: func(context.Context) error {
				if asked[1]++; kept {
					return ErrBusy
				}
				return nil
			}}}
	})
	r := register(t, e, "kv", 1<<16)
	kept = true
	require.ErrorIs(t, r.Close(), ErrBusy)
	register(t, e, "other", 1<<16)
	p, err := e.Self()
	require.NoError(t, err)
	require.ErrorIs(t, transfer(t, p, Write).Add(r, 0, remote(t, p, "other"), 0, 1), ErrClosed)
	_, err = r.Lease(0, 1, LeaseOptions{})
	require.ErrorIs(t, err, ErrClosed)
	kept = false
	require.NoError(t, r.Close())
	require.Equal(t, [2]int{1, 3}, asked)
}

// TestSecondCloseBesideAFailedOne: the first finds no proof, the second, which came meanwhile,
// does. The region takes no transfer any more.
func TestSecondCloseBesideAFailedOne(t *testing.T) {
	entered, answer := make(chan struct{}), make(chan error)
	f := &fake{onRevoke: func(ctx context.Context) error {
		if ctx.Err() != nil {
			return driver.ContextError(ctx)
		}
		entered <- struct{}{}
		return <-answer
	}}
	e := open(t, "a", func(c *Config) { c.Backends = []driver.Backend{f} })
	old := register(t, e, "old", 1<<16)
	register(t, e, "target", 1<<16)
	p, err := e.Self()
	require.NoError(t, err)
	both := make(chan error, 2)
	go func() { both <- old.Close() }()
	<-entered
	go func() { both <- old.Close() }()
	answer <- ErrTimeout
	<-entered // the second, whether it waited or has just come
	answer <- nil
	first, second := <-both, <-both
	if first == nil {
		first, second = second, first
	}
	require.ErrorIs(t, first, ErrTimeout)
	require.NoError(t, second)
	f.onRevoke = nil
	require.ErrorIs(t, transfer(t, p, Write).Add(old, 0, remote(t, p, "target"), 0, 1), ErrClosed)
}

// TestRevokesWaitSideBySide: two revokes that must wait end by each other, and one that need not
// is asked once, with a context that is over.
func TestRevokesWaitSideBySide(t *testing.T) {
	meet, asked := make(chan struct{}), []error(nil)
	waits := func(ctx context.Context) error {
		if ctx.Err() != nil {
			return driver.ContextError(ctx)
		}
		select {
		case meet <- struct{}{}:
			return nil
		case <-meet:
			return nil
		case <-ctx.Done():
			return driver.ContextError(ctx)
		}
	}
	e := open(t, "e", func(c *Config) {
		c.Backends = []driver.Backend{&fake{name: "0", onRevoke: waits},
			&fake{name: "1", onRevoke: func(ctx context.Context) error {
				asked = append(asked, ctx.Err())
				return nil
			}},
			&fake{name: "2", onRevoke: waits}}
	})
	require.NoError(t, register(t, e, "r", 4096).Close())
	require.Equal(t, []error{context.Canceled}, asked)
}

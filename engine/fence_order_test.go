// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// keeping is a backend whose memories have no proof while kept is set.
type keeping struct {
	named
	kept  bool
	asked int
	open  int // memories
}

func (k *keeping) Register(seg driver.Segment) (driver.Memory, error) {
	m, err := k.named.Register(seg)
	k.open++
	return revokedBy(m, err, func(ctx context.Context, m driver.Memory) error {
		if k.asked++; k.kept {
			return ErrBusy
		}
		k.open--
		return m.Revoke(ctx)
	})
}

// TestLeaseThatIsRefusedLeavesNothing, though a backend keeps its part of the memory at first: the
// engine asks again, and the region is not closed before.
func TestLeaseThatIsRefusedLeavesNothing(t *testing.T) {
	testkit.InVirtualTime(t, func(t *testing.T) {
		inner, err := mem.New(mem.Config{})
		require.NoError(t, err)
		b := &keeping{named: named{inner, "one", 1e9}}
		e, err := Open(Config{Name: "a", Backends: []driver.Backend{b}, LeasesMax: 1})
		require.NoError(t, err)
		defer e.Close()
		r, err := e.Register("kv", HostSegment(make([]byte, 4096)))
		require.NoError(t, err)
		l, err := r.Lease(0, 1, LeaseOptions{})
		require.NoError(t, err)
		b.kept = true
		_, err = r.Lease(0, 1, LeaseOptions{})
		require.ErrorIs(t, err, ErrFull)
		b.kept = false
		require.NoError(t, l.Revoke(t.Context()))
		require.NoError(t, r.Close())
		require.Zero(t, b.open, "memories of a region that is closed")
	})
}

// TestCloseAfterAFailedClose: of two backends one keeps the memory at first. The next Close asks
// that one alone, as the other's key may be another memory's by then.
func TestCloseAfterAFailedClose(t *testing.T) {
	var both [2]*keeping
	names := [2]string{"one", "two"}
	for i := range both {
		b, err := mem.New(mem.Config{})
		require.NoError(t, err)
		both[i] = &keeping{named: named{b, names[i], 1e9}}
	}
	e, err := Open(Config{Name: "a", Backends: []driver.Backend{both[0], both[1]}})
	require.NoError(t, err)
	defer e.Close()
	r, err := e.Register("kv", HostSegment(make([]byte, 4096)))
	require.NoError(t, err)
	both[1].kept = true
	require.ErrorIs(t, r.Close(), ErrBusy)
	other := register(t, e, "other", 4096) // has the key that is free
	p, err := e.Self()
	require.NoError(t, err)
	tr, err := e.NewTransfer(p, Write, Route{Only: "one"})
	require.NoError(t, err)
	require.ErrorIs(t, tr.Add(r, 0, remote(t, p, "other"), 0, 4096), ErrClosed)
	_, err = r.Lease(0, 1, LeaseOptions{})
	require.ErrorIs(t, err, ErrClosed)
	both[1].kept = false
	require.NoError(t, r.Close())
	require.NoError(t, tr.Close())
	require.NoError(t, other.Close())
	require.Equal(t, [2]int{2, 4}, [2]int{both[0].asked, both[1].asked})
}

// steered is a backend whose revokes the test answers.
type steered struct {
	named
	entered chan struct{}
	answer  chan error
}

func (s *steered) Register(seg driver.Segment) (driver.Memory, error) {
	m, err := s.named.Register(seg)
	return revokedBy(m, err, func(ctx context.Context, m driver.Memory) error {
		if s.answer == nil {
			return m.Revoke(ctx)
		}
		if ctx.Err() != nil {
			return driver.ContextError(ctx)
		}
		s.entered <- struct{}{}
		if err := <-s.answer; err != nil {
			return err
		}
		return m.Revoke(ctx)
	})
}

// TestSecondCloseBesideAFailedOne: the first finds no proof, the second, which came meanwhile,
// does. The region takes no transfer any more.
func TestSecondCloseBesideAFailedOne(t *testing.T) {
	b, err := mem.New(mem.Config{})
	require.NoError(t, err)
	s := &steered{named: named{b, "one", 1e9}}
	e, err := Open(Config{Name: "a", Backends: []driver.Backend{s}})
	require.NoError(t, err)
	defer e.Close()
	old := register(t, e, "old", 4096)
	register(t, e, "target", 4096)
	p, err := e.Self()
	require.NoError(t, err)
	s.entered, s.answer = make(chan struct{}), make(chan error)
	both := make(chan error, 2)
	go func() { both <- old.Close() }()
	<-s.entered
	go func() { both <- old.Close() }()
	s.answer <- ErrTimeout
	<-s.entered // the second, whether it waited or has just come
	s.answer <- nil
	first, second := <-both, <-both
	if first == nil {
		first, second = second, first
	}
	require.ErrorIs(t, first, ErrTimeout)
	require.NoError(t, second)
	s.answer = nil
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

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// eventually fails the test when f does not return within limit.
func eventually(t *testing.T, what string, f func()) {
	t.Helper()
	ended := make(chan struct{})
	go func() { defer close(ended); f() }()
	select {
	case <-ended:
	case <-time.After(limit):
		t.Fatal(what, "does not end")
	}
}

// TestCloseBesideConnect closes the engine, and looks at its counters, while a
// backend connects.
func TestCloseBesideConnect(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	connecting, closed := make(chan struct{}), make(chan struct{})
	f := &fake{onConnect: func(int) error { close(connecting); <-closed; return nil }}
	e := open(t, "e", func(c *Config) { c.Backends = []driver.Backend{f} })
	outcome := make(chan error)
	go func() {
		_, err := e.Self()
		outcome <- err
	}()
	<-connecting
	_ = e.Stats()
	eventually(t, "Close beside Connect", func() { check(t, e.Close()) })
	close(closed)
	require.ErrorIs(t, <-outcome, ErrClosed, "a connection came of it")
	require.Zero(t, e.Stats().Peers)
}

// TestCloseOfABrokenBackend has transfers that no backend ever ends: who waits is
// released all the same.
func TestCloseOfABrokenBackend(t *testing.T) { testkit.InVirtualTime(t, closeOfABrokenBackend) }

func closeOfABrokenBackend(t *testing.T) {
	p, r, m := overFake(t, &fake{manual: true, brokenClose: true}, limit)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, m, 3)
	check(t, tr.Post())
	hurry(t, p.e, 30*time.Millisecond)
	waited := make(chan error)
	go func() { waited <- tr.Wait(context.Background()) }()
	eventually(t, "Close", func() { _ = p.e.Close() })
	select {
	case err := <-waited:
		require.ErrorIs(t, err, ErrClosed, "outcome")
	case <-time.After(limit):
		t.Fatal("Wait outlives the engine")
	}
	require.Error(t, tr.Abort(within(t)), "Abort claims a proof that nobody gave")
	require.ErrorIs(t, tr.Post(), ErrClosed, "posted on a closed engine")
}

// TestPeerCloseAsksAgain a backend that has not ended its connection: nil says that all have.
func TestPeerCloseAsksAgain(t *testing.T) {
	var stuck atomic.Bool
	asked := 0
	p, _, _ := overFake(t, &fake{onClose: func() error {
		asked++
		if stuck.Load() {
			return ErrUnproven
		}
		return nil
	}}, limit)
	stuck.Store(true)
	require.ErrorIs(t, p.Close(), ErrUnproven)
	require.ErrorIs(t, p.Close(), ErrUnproven)
	stuck.Store(false)
	check(t, p.Close())
	check(t, p.Close())
	require.Equal(t, 3, asked)
}

// notGiven is memory that is not taken back at first.
type notGiven struct{ tries int }

func (m *notGiven) Close() error {
	if m.tries++; m.tries == 1 {
		return ErrBusy
	}
	return nil
}

// TestStagingMemoryCountsUntilItIsGone: Config.StagingBytes bounds what is mapped.
func TestStagingMemoryCountsUntilItIsGone(t *testing.T) {
	e := open(t, "e")
	e.stager.used.Add(slotBytes)
	p := &pool{slots: 1, memory: &notGiven{}, region: register(t, e, "staging", 64)}
	p.close(e.stager, false)
	require.EqualValues(t, slotBytes, e.stager.used.Load())
	p.close(e.stager, false)
	require.Zero(t, e.stager.used.Load())
}

// TestEveryCloseWaits calls Close twice at once, of a region and of its engine:
// who returns nil has the proof.
func TestEveryCloseWaits(t *testing.T) {
	begun, goOn := make(chan struct{}, 9), make(chan struct{})
	f := &fake{onRevoke: func(context.Context) error {
		begun <- struct{}{}
		<-goOn
		return nil
	}}
	e := open(t, "e", func(c *Config) { c.Backends = []driver.Backend{f} })
	r := register(t, e, "r", 64)
	early := make(chan string, 4)
	var all sync.WaitGroup
	for _, closer := range []struct {
		name string
		f    func() error
	}{{"region", r.Close}, {"engine", e.Close}} {
		for range 2 {
			all.Add(1)
			go func() {
				defer all.Done()
				check(t, closer.f())
				early <- closer.name
			}()
		}
	}
	<-begun
	select {
	case name := <-early:
		t.Errorf("Close of the %s returned before the revoke did", name)
	case <-time.After(50 * time.Millisecond):
	}
	close(goOn)
	eventually(t, "Close", all.Wait)
	require.Empty(t, begun, "the memory was revoked once more")
}

// TestEachCloseSaysThatNothingIsProved has a second Close beside the first, and a third after it: a
// program that heard nil would use memory in which bytes may land still.
func TestEachCloseSaysThatNothingIsProved(t *testing.T) {
	entered := make(chan struct{})
	once := sync.OnceFunc(func() { close(entered) })
	e := open(t, "e", func(c *Config) {
		c.AbortGrace = 200 * time.Millisecond
		c.Backends = []driver.Backend{&fake{brokenClose: true, onRevoke: func(
			ctx context.Context) error {
			once()
			<-ctx.Done()
			return driver.ContextError(ctx)
		}}}
	})
	register(t, e, "data", 4096)
	var all sync.WaitGroup
	var errs [3]error
	all.Go(func() { errs[0] = e.Close() })
	all.Go(func() { <-entered; errs[1] = e.Close() })
	all.Wait()
	errs[2] = e.Close()
	for i, err := range errs {
		require.ErrorIs(t, err, ErrUnproven, "Close %d", i)
	}
}

// TestAfterClose does what a program does when it ends in the wrong order.
func TestAfterClose(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	a, b := open(t, "a"), open(t, "b")
	src, dst := register(t, a, "src", 1<<16), register(t, b, "dst", 1<<16)
	p := connect(t, a, b)
	m := remote(t, p, "dst")
	tr := transfer(t, p, Write)
	check(t, tr.Add(src, 0, m, 0, 100))
	l, err := dst.Lease(0, 4096, LeaseOptions{TTL: time.Hour})
	check(t, err)
	leased, err := p.Import(l.Token())
	check(t, err)
	description, err := b.Describe()
	check(t, err)
	check(t, b.Close())
	check(t, a.Close())
	for what, err := range map[string]error{
		"revoke": l.Revoke(within(t)), "remote": leased.Close(), "peer": p.Close(),
		"transfer": tr.Close(),
		"engine":   a.Close(), "region": dst.Close(), "listed region": src.Close(),
	} {
		require.NoError(t, err, "close %s", what)
	}
	for what, err := range map[string]error{
		"notify": p.Notify(within(t), nil), "connect": second(a.Connect(within(t), description)),
		"self": second(a.Self()), "lease": second(dst.Lease(0, 1, LeaseOptions{})),
		"transfer": second(a.NewTransfer(p, Write, Route{})),
		"dial":     second(a.Dial(within(t), "unix", "/nonexistent/socket")),
	} {
		require.ErrorIs(t, err, ErrClosed, "%s on a closed engine", what)
	}
}

// TestOpenWithAClosedBackend: its descriptor may be somebody else's by then.
func TestOpenWithAClosedBackend(t *testing.T) {
	b, err := mem.New(mem.Config{})
	check(t, err)
	check(t, b.Close())
	require.ErrorIs(t, second(Open(Config{Backends: []Backend{b}})), ErrClosed,
		"open with a closed backend")
}

func second[T any](_ T, err error) error { return err }

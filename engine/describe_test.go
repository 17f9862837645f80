// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/internal/wire"
)

// describes fails the test unless the engine tells of these regions, in order, and each can be
// reached.
func describes(t *testing.T, e *Engine, want ...string) {
	t.Helper()
	reader := open(t, "reader")
	defer reader.Close()
	src := register(t, reader, "src", 4096)
	p := connect(t, reader, e)
	if got := p.Remotes(); !slices.Equal(got, want) {
		t.Fatalf("described %q, want %q", got, want)
	}
	self, err := e.Self()
	check(t, err)
	if got := self.Remotes(); !slices.Equal(got, want) {
		t.Fatalf("to itself %q, want %q", got, want)
	}
	for _, name := range want {
		tr := transfer(t, p, Read)
		check(t, tr.Add(src, 0, remote(t, p, name), 0, 64))
		run(t, tr)
		check(t, tr.Close())
	}
}

// TestDescribeFollowsWhatIsRegistered: what was described before is of no consequence.
func TestDescribeFollowsWhatIsRegistered(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	e := open(t, "owner")
	describes(t, e)
	b := register(t, e, "b", 4096)
	describes(t, e, "b")
	register(t, e, "c", 4096)
	describes(t, e, "b", "c")
	register(t, e, "a", 4096) // not in order
	describes(t, e, "a", "b", "c")
	_, err := e.RegisterPrivate("bb", b.Segment())
	check(t, err)
	describes(t, e, "a", "b", "c")
	check(t, b.Close())
	describes(t, e, "a", "c")
	b, err = e.Register("b", b.Segment())
	check(t, err)
	describes(t, e, "a", "b", "c")
	require.ErrorIs(t, second(e.Register("b", b.Segment())), ErrBusy, "a name that is taken")
	describes(t, e, "a", "b", "c")
}

// TestDescribeAfterTheEpochHasEnded: a name that is registered again, on the same memory, has
// another token, and the old one opens nothing.
func TestDescribeAfterTheEpochHasEnded(t *testing.T) {
	e, reader := open(t, "owner"), open(t, "reader")
	r, src := register(t, e, "kv", 4096), register(t, reader, "src", 4096)
	old := connect(t, reader, e)
	for range 3 {
		seg := r.Segment()
		before, err := e.Describe()
		check(t, err)
		check(t, r.Close())
		r, err = e.Register("kv", seg)
		check(t, err)
		after, err := e.Describe()
		check(t, err)
		require.False(t, slices.Equal(before, after),
			"the description is that of the region that was closed")
		check(t, old.Refresh(before))
		if err := readOnce(t, old, src); !errors.Is(err, ErrRevoked) &&
			!errors.Is(err, driver.ErrBadToken) {
			t.Errorf("what was described before the region was closed: %v", err)
		}
		check(t, old.Refresh(after))
		check(t, readOnce(t, old, src))
	}
}

// readOnce reads from the peer's region "kv", as it was described last.
func readOnce(t *testing.T, p *Peer, src *Region) error {
	t.Helper()
	tr := transfer(t, p, Read)
	defer tr.Close()
	if err := tr.Add(src, 0, remote(t, p, "kv"), 0, 64); err != nil {
		return err
	}
	check(t, tr.Post())
	return tr.Wait(context.Background())
}

// TestConnectKeepsNothingOfTheDescription uses the buffer of a description again: a write goes to
// the region that was described under its name.
func TestConnectKeepsNothingOfTheDescription(t *testing.T) {
	a, b := open(t, "a"), open(t, "b")
	src := register(t, a, "src", 64)
	fill(src.Bytes(), 5)
	one, two := register(t, b, "one", 64), register(t, b, "two", 64)
	describe := func(r *Region) []byte {
		d, err := b.Describe(r)
		require.NoError(t, err)
		return d
	}
	buffer := describe(one)
	p, err := a.Connect(within(t), buffer)
	require.NoError(t, err)
	other := describe(two)
	copy(buffer, other[:min(len(other), len(buffer))])
	tr := transfer(t, p, Write)
	check(t, tr.Add(src, 0, remote(t, p, "one"), 0, 64))
	run(t, tr)
	require.Equal(t, src.Bytes(), one.Bytes())
	require.NotEqual(t, src.Bytes(), two.Bytes())
	again := describe(two)
	require.NoError(t, p.Refresh(again))
	clear(again)
	check(t, tr.Reset())
	check(t, tr.Add(src, 0, remote(t, p, "two"), 0, 64))
	run(t, tr)
	require.Equal(t, src.Bytes(), two.Bytes())
}

func TestDescribeRegionOfAnotherEngine(t *testing.T) {
	a, b := open(t, "a"), open(t, "b")
	_, err := a.Describe(register(t, b, "r", 64))
	require.ErrorIs(t, err, ErrBounds)
}

// TestImportsOfOldRegistrations registers a region anew many times: what was imported of the
// old ones is dropped, once no transfer lists them.
func TestImportsOfOldRegistrations(t *testing.T) {
	e, other := open(t, "e"), open(t, "other")
	src := register(t, e, "src", 4096)
	mine := register(t, other, "mine", 4096)
	self, err := e.Self()
	require.NoError(t, err)
	peer := connect(t, other, e)
	held := transfer(t, self, Write)
	var first *Remote
	for i := range 200 {
		r := register(t, e, "kv", 4096)
		d, err := e.Describe()
		require.NoError(t, err)
		require.NoError(t, peer.Refresh(d))
		for p, from := range map[*Peer]*Region{self: src, peer: mine} {
			m := remote(t, p, "kv")
			tr := transfer(t, p, Write)
			check(t, tr.Add(from, 0, m, 0, 4096))
			run(t, tr)
			require.Less(t, tr.groups[0].descs[0].RemoteKey, uint32(16))
			check(t, tr.Close())
			if i == 0 && p == self {
				first = m
				check(t, held.Add(src, 0, m, 0, 1))
			}
		}
		check(t, r.Close())
	}
	first.mu.Lock()
	require.True(t, first.imports[0].known, "dropped though a transfer lists it")
	first.mu.Unlock()
	check(t, held.Close())
	first.mu.Lock()
	require.False(t, first.imports[0].known)
	first.mu.Unlock()
}

// TestMeter measures a connection by the bytes of all transfers over the time in which any was
// under way, and forgets.
func TestMeter(t *testing.T) {
	const declared = 1e9
	var m meter
	now := time.Duration(0)
	for range rateSamplesMin { // one at a time: 1 MiB in 1 ms
		m.enter(now)
		now += time.Millisecond
		m.leave(now, 1<<20, true)
		now += time.Second
	}
	now -= time.Second
	alone, measured := m.estimate(now, declared)
	require.True(t, measured)
	require.InEpsilon(t, float64(1<<20)*1000, alone, 0.001)
	for range 4 { // 128 at once, a millisecond each, one behind the other
		for range 128 {
			m.enter(now)
		}
		for range 128 {
			now += time.Millisecond
			m.leave(now, 1<<20, true)
		}
	}
	rate, _ := m.estimate(now, declared)
	require.InEpsilon(t, alone, rate, 0.01, "a burst has changed the rate")
	m.enter(now)
	now += time.Minute
	m.leave(now, 1<<20, false)
	rate, _ = m.estimate(now, declared)
	require.Less(t, rate, alone)
	rate, _ = m.estimate(now+rateHalfLife, alone*100)
	require.Greater(t, rate, 40*alone)
	_, measured = m.estimate(now+time.Hour, declared)
	require.False(t, measured)
}

// TestImportIsTriedAgain has an import that fails for a reason that passes.
func TestImportIsTriedAgain(t *testing.T) {
	for _, c := range []struct {
		err   error
		tries int
	}{{ErrTimeout, 2}, {ErrFull, 2}, {ErrRevoked, 1}, {driver.ErrBadToken, 1}} {
		tries := 0
		f := &fake{}
		f.onImport = func() error {
			if tries++; tries == 1 {
				return c.err
			}
			return nil
		}
		p, r, m := overFake(t, f, limit)
		require.ErrorIs(t, transfer(t, p, Write).Add(r, 0, m, 0, 1), c.err, "the first time")
		err := transfer(t, p, Write).Add(r, 0, m, 0, 1)
		if tries != c.tries || (err == nil) != (tries == 2) {
			t.Errorf("after %v: tried %d times, then %v", c.err, tries, err)
		}
	}
}

// TestImportOverALostConnection: that the engine closes such a connection is no reason to tell.
func TestImportOverALostConnection(t *testing.T) {
	f := &fake{}
	p, r, _ := overFake(t, f, limit)
	l, err := r.Lease(0, 8, LeaseOptions{})
	require.NoError(t, err)
	f.onImport = func() error {
		for _, c := range p.conns {
			if c == nil {
				continue
			}
			if over, ok := c.p.(*fakePeer); ok {
				over.lose()
				<-c.gone
			}
		}
		return driver.ErrClosed
	}
	_, err = p.Import(l.Token())
	require.ErrorIs(t, err, ErrPeerLost)
	require.NotErrorIs(t, err, ErrClosed)
}

// TestSelfIsRenewed has the connection to itself break.
func TestSelfIsRenewed(t *testing.T) { testkit.InVirtualTime(t, selfIsRenewed) }

func selfIsRenewed(t *testing.T) {
	f := &fake{manual: true}
	p, r, m := overFake(t, f, 20*time.Millisecond)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, m, 1)
	check(t, tr.Post())
	require.ErrorIs(t, tr.Wait(within(t)), ErrTimeout)
	<-p.Lost()
	q, err := p.e.Self()
	check(t, err)
	check(t, transfer(t, q, Write).Add(r, 0, remote(t, q, "r"), 0, 1))
	require.EqualValues(t, 1, p.e.Stats().Peers, "peers are known")
	if names := q.Remotes(); len(names) != 1 || names[0] != "r" {
		t.Errorf("the own regions are %q", names)
	}
}

// TestSelfForgetsRegions that are closed: a program that registers one for each request keeps none
// of them.
func TestSelfForgetsRegions(t *testing.T) {
	e := open(t, "e")
	p, err := e.Self()
	require.NoError(t, err)
	dst := register(t, e, "dst", 64)
	for i := range 10 {
		r := register(t, e, fmt.Sprint("request ", i), 64)
		tr := transfer(t, p, Read)
		check(t, tr.Add(dst, 0, remote(t, p, r.Name()), 0, 64))
		run(t, tr)
		check(t, tr.Close())
		check(t, r.Close())
	}
	require.Empty(t, p.remotes)
}

// TestFailedConnectsLeaveNothing of the chains that a peer would have had.
func TestFailedConnectsLeaveNothing(t *testing.T) {
	e := open(t, "e")
	gone, err := wire.Encode(nil, &wire.Description{Engine: wire.ID{7}, Name: "gone",
		Backends: []wire.Backend{{Name: "tcp", Addr: []byte("x")}}})
	require.NoError(t, err)
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	const times = 50_000
	before := heap()
	for range times {
		_, err := e.Connect(t.Context(), gone)
		require.ErrorIs(t, err, ErrNoRoute)
	}
	require.Less(t, heap(), before+50*times, "bytes are kept for each")
}

// TestAnswersMakeNoSender: a hello that comes as an answer, by a connection of ours, begins no
// sender, as no last word would end it.
func TestAnswersMakeNoSender(t *testing.T) {
	a, b := open(t, "a"), open(t, "b")
	register(t, b, "r", 64)
	p := connect(t, a, b)
	l := a.lanes[0]
	l.receiveMu.Lock()
	defer l.receiveMu.Unlock()
	_, forProgram := l.dispatch(&driver.Message{Conn: p.conns[0].p.Conn(), Data: b.hello(
		wire.Secret{})})
	require.False(t, forProgram)
	require.Empty(t, l.senders)
}

// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/freeze"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// Over a network whose round trip is longer than Grace, transfers both ways go on, and the
// proof of Close waits for the longer limit.
func TestRoundTripLongerThanGrace(t *testing.T) {
	leak.Check(t)
	const n, delay = 1 << 20, 60 * time.Millisecond
	cfg := Config{Grace: 50 * time.Millisecond}
	owner, near := open(t, cfg), open(t, cfg)
	m, away := share(t, owner, n)
	l, local := share(t, near, n)
	p := dial(t, near, slowNetwork(t, owner, delay, 0))
	require.GreaterOrEqual(t, p.grace, int64(cfg.Grace+2*delay))
	key := take(t, p, m)
	fill(local, 7)
	d := []driver.Desc{{Len: n, LocalKey: l.key, RemoteKey: key}}
	require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write, Descs: d,
		Tail: driver.NotifyTail}))
	require.NoError(t, await(t, near, 1))
	require.True(t, bytes.Equal(local, away), "written bytes")
	require.Empty(t, receive(t, owner).Data)
	fill(away, 9)
	require.NoError(t, p.Submit(2, &driver.Batch{Op: driver.Read, Descs: d}))
	require.NoError(t, await(t, near, 2))
	require.True(t, bytes.Equal(local, away), "read bytes")
}

// setGrace refuses a round trip that makes every byte too old, and its error names Grace.
func TestRoundTripBeyondAnyLimit(t *testing.T) {
	p := &peer{b: open(t, Config{})}
	p.roundTrip.Store(int64(roundTripMax))
	require.NoError(t, p.setGrace(0))
	p.roundTrip.Store(int64(roundTripMax + time.Second))
	err := p.setGrace(0)
	require.ErrorIs(t, err, driver.ErrTimeout)
	require.ErrorContains(t, err, "a round trip takes 5s: bytes may be as old as Config.Grace")
}

// A round trip that grows once the connection stands makes the limit grow, since confirmations
// come too late for the first one.
func TestRoundTripGrows(t *testing.T) {
	leak.Check(t)
	const n = 1 << 20
	cfg := Config{Grace: 20 * time.Millisecond}
	owner, near := open(t, cfg), open(t, cfg)
	m, away := share(t, owner, n)
	l, local := share(t, near, n)
	link := newNetwork(t, owner)
	p := dial(t, near, link.addr)
	key := take(t, p, m)
	before := p.grace // of a busy machine more than Grace
	link.delay.Store(max(int64(80*time.Millisecond), 2*before))
	fill(local, 7)
	d := []driver.Desc{{Len: n, LocalKey: l.key, RemoteKey: key}}
	require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write, Descs: d}))
	require.NoError(t, await(t, near, 1))
	require.True(t, bytes.Equal(local, away), "written bytes")
	p.mu.Lock()
	after := p.grace
	p.mu.Unlock()
	require.Greater(t, after, before)
	require.LessOrEqual(t, after, p.graceTop)
}

// Of two Graces the larger counts, at both ends.
func TestLargerGraceCounts(t *testing.T) {
	leak.Check(t)
	short, long := open(t, Config{Grace: 20 * time.Millisecond}),
		open(t, Config{Grace: 2 * time.Second})
	for _, x := range [][2]*Backend{{short, long}, {long, short}} {
		p := dial(t, x[0], x[1].Addr())
		require.GreaterOrEqual(t, p.grace, int64(2*time.Second))
		for g := range acceptedBy(x[1]) {
			require.GreaterOrEqual(t, g.ages.limit.Load(), int64(2*time.Second))
			require.LessOrEqual(t, g.ages.limit.Load(), p.grace)
		}
	}
}

// acceptedBy lists the connections that a backend has accepted.
func acceptedBy(b *Backend) map[*inbound]bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := map[*inbound]bool{}
	for _, g := range b.accepted {
		all[g] = true
	}
	return all
}

// endless makes the age limit of a peer so long that nobody waits for it.
func endless(p *peer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.grace = int64(4 * limit)
}

// Close over a slow link with much on its way ends within CloseMax and a round trip of the
// link, by the word of the owner that it has stopped, and nothing lands afterwards.
func TestCloseOverSlowLink(t *testing.T) {
	leak.Check(t)
	const n = 16 << 20
	owner, near := open(t, Config{}), open(t, Config{CloseMax: 100 * time.Millisecond})
	m, away := share(t, owner, n)
	l, local := share(t, near, n)
	link := newNetwork(t, owner)
	p := dial(t, near, link.addr)
	endless(p)
	key := take(t, p, m)
	link.rate.Store(1 << 20)
	fill(local, 0xEE)
	d := []driver.Desc{{Len: n, LocalKey: l.key, RemoteKey: key}}
	require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write, Descs: d}))
	for away[0] != 0xEE {
		time.Sleep(time.Millisecond)
	}
	link.rate.Store(16 << 10) // all the rest takes minutes
	begin := clock()
	require.NoError(t, p.Close())
	require.Less(t, time.Duration(clock()-begin), limit, "Close waited for the age limit")
	require.ErrorIs(t, await(t, near, 1), driver.ErrClosed)
	landed := bytes.Count(away, []byte{0xEE})
	require.Less(t, landed, n)
	link.rate.Store(0)
	time.Sleep(200 * time.Millisecond)
	require.Equal(t, landed, bytes.Count(away, []byte{0xEE}), "bytes landed after Close")
}

// One connection for data is reset: the transfer ends by the owner's word that it has stopped.
func TestLossOfOneConnectionIsProved(t *testing.T) {
	leak.Check(t)
	const n = 16 << 20
	owner, near := open(t, Config{}), open(t, Config{})
	m, away := share(t, owner, n)
	l, local := share(t, near, n)
	link := newNetwork(t, owner)
	p := dial(t, near, link.addr)
	endless(p)
	key := take(t, p, m)
	link.rate.Store(1 << 20)
	fill(local, 0xEE)
	d := []driver.Desc{{Len: n, LocalKey: l.key, RemoteKey: key}}
	require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write, Descs: d}))
	for away[0] != 0xEE {
		time.Sleep(time.Millisecond)
	}
	link.rate.Store(16 << 10) // all the rest takes minutes
	begin := clock()
	require.NoError(t, p.conns[bulk].tcp.SetLinger(0))
	require.NoError(t, p.conns[bulk].tcp.Close())
	require.ErrorIs(t, await(t, near, 1), driver.ErrPeerLost)
	require.Less(t, time.Duration(clock()-begin), limit, "the end waited for the age limit")
	landed := bytes.Count(away, []byte{0xEE})
	link.rate.Store(0)
	time.Sleep(200 * time.Millisecond)
	require.Equal(t, landed, bytes.Count(away, []byte{0xEE}), "bytes landed after the "+
		"transfer had ended")
}

// A peer that is silent is not lost as long as nothing waits for it. Where a transfer waits,
// it ends within Failure and the age limit, with its typed error.
func TestSilenceIsNoLoss(t *testing.T) {
	// A machine that stands still for Failure makes a live owner silent: then with a longer one.
	for failure := 300 * time.Millisecond; ; failure *= 2 {
		err := silentFor(t, failure)
		if err == nil {
			return
		}
		require.ErrorIs(t, err, driver.ErrPeerLost)
		require.Less(t, failure, 4*time.Second, "a peer that was silent is lost when it goes on")
	}
}

// silentFor reports an error where writes to an owner that is not stopped fail.
func silentFor(t *testing.T, failure time.Duration) error {
	t.Helper()
	o := startOwner(t)
	b := open(t, Config{Failure: failure})
	m, local := share(t, b, ownerBytes)
	fill(local, 3)
	p := dial(t, b, o.addr)
	key, size, err := p.Import(o.token)
	require.NoError(t, err)
	d := []driver.Desc{{Len: size, LocalKey: m.key, RemoteKey: key}}
	write := &driver.Batch{Op: driver.Write, Descs: d}
	require.NoError(t, p.Submit(1, write))
	if err := await(t, b, 1); err != nil {
		return err
	}

	require.NoError(t, freeze.Process(o.cmd.Process))
	select {
	case <-p.Lost():
		require.Fail(t, "a silent peer is lost though nothing waits for it")
	case <-time.After(5 * failure):
	}
	require.NoError(t, freeze.Thaw(o.cmd.Process))
	require.NoError(t, p.Submit(2, write))
	if err := await(t, b, 2); err != nil {
		return err
	}

	require.NoError(t, freeze.Process(o.cmd.Process))
	begin := clock()
	require.NoError(t, p.Submit(3, write))
	require.ErrorIs(t, await(t, b, 3), driver.ErrPeerLost)
	require.Greater(t, clock()-begin, int64(failure))
	select {
	case <-p.Lost():
	default:
		require.Fail(t, "Lost is not closed")
	}
	return nil
}

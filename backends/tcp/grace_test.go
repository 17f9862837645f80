// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"bytes"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

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
	testkit.CheckLeaks(t)
	const n = 1 << 20
	clock := testkit.NewClock()
	owner, near := openBy(t, clock, Config{}), openBy(t, clock, Config{})
	m, away := share(t, owner, n)
	l, local := share(t, near, n)
	link := newNetwork(t, owner)
	p := dial(t, near, link.addr)
	key := importKey(t, p, m)
	grace := int64(near.cfg.Grace)
	require.Equal(t, grace, p.grace)
	link.delay.Store(grace * 4 / 3)
	defer clock.Run(10 * time.Millisecond)()
	fill(local, 7)
	d := []driver.Desc{{Len: n, LocalKey: l.key, RemoteKey: key}}
	require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write, Descs: d}))
	require.NoError(t, await(t, near, 1))
	require.True(t, bytes.Equal(local, away), "written bytes")
	p.mu.Lock()
	after := p.grace
	p.mu.Unlock()
	require.Greater(t, after, grace)
	require.LessOrEqual(t, after, p.graceMost)
}

// Of two Graces the larger counts, at both ends.
func TestLargerGraceCounts(t *testing.T) {
	testkit.CheckLeaks(t)
	clock, larger := testkit.NewClock(), 4*time.Second
	short := openBy(t, clock, Config{Grace: larger / 2})
	long := openBy(t, clock, Config{Grace: larger})
	for _, x := range [][2]*Backend{{short, long}, {long, short}} {
		p := dial(t, x[0], x[1].Addr())
		require.Equal(t, int64(larger), p.grace)
		for g := range acceptedBy(x[1]) {
			require.Equal(t, int64(larger), g.ages.limit.Load())
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

// unchanged fails the test where more bytes are there than had landed.
func unchanged(t *testing.T, mem []byte, landed int, when string) {
	t.Helper()
	if n := bytes.Count(mem, []byte{0xEE}); n != landed {
		testkit.FatalBroken(t, "%d bytes landed %s", n-landed, when)
	}
}

// A peer ends over a slow link with much on its way, by its Close or since a connection for data is
// reset: the transfer ends by the owner's word that it has stopped, in less than the age limit, and
// nothing lands afterwards.
func TestEndsOverASlowLinkAreProved(t *testing.T) {
	const n = 16 << 20
	for why, end := range map[error]func(p *peer) error{
		driver.ErrClosed: (*peer).Close,
		driver.ErrPeerLost: func(p *peer) error {
			require.NoError(t, p.conns[bulk].tcp.SetLinger(0))
			return p.conns[bulk].tcp.Close()
		},
	} {
		t.Run(why.Error(), func(t *testing.T) {
			testkit.CheckLeaks(t)
			clock := running(t, time.Millisecond)
			owner, near := openBy(t, clock, Config{}), openBy(t, clock, Config{})
			m, away := share(t, owner, n)
			l, local := share(t, near, n)
			link := newNetwork(t, owner)
			p := dial(t, near, link.addr)
			p.mu.Lock()
			p.grace = int64(4 * limit)
			p.mu.Unlock()
			key := importKey(t, p, m)
			link.rate.Store(1 << 20)
			fill(local, 0xEE)
			d := []driver.Desc{{Len: n, LocalKey: l.key, RemoteKey: key}}
			require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write, Descs: d}))
			for away[0] != 0xEE {
				time.Sleep(time.Millisecond)
			}
			link.rate.Store(16 << 10) // all the rest takes minutes
			begin := clock.Now()
			require.NoError(t, end(p))
			require.ErrorIs(t, await(t, near, 1), why)
			require.Less(t, time.Duration(clock.Now()-begin), limit, "it waited for the age limit")
			landed := bytes.Count(away, []byte{0xEE})
			require.Less(t, landed, n)
			link.rate.Store(0)
			time.Sleep(200 * time.Millisecond)
			unchanged(t, away, landed, "after the transfer had ended")
		})
	}
}

// TestNoPieceOnceStopped: stop waits for the piece in hand, and lets none begin behind it. What an
// owner says of itself rests on that.
func TestNoPieceOnceStopped(t *testing.T) {
	c, l := &conn{}, &landing{mem: make([]byte, 8)}
	require.NoError(t, c.beginPiece(l))
	begun, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		close(begun)
		c.stop()
		close(stopped)
	}()
	<-begun
	for range 1000 { // so that a stop that does not wait has ended
		runtime.Gosched()
	}
	require.False(t, c.stopped.Load() || c.landMu.TryLock(), "a piece in hand holds nothing up")
	c.endPiece(l)
	<-stopped
	require.ErrorIs(t, c.beginPiece(l), errStopped)
}

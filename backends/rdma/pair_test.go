// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package rdma

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testing/standin"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// pair is two backends, one connected to the other. Their rails are devices of the stand-in: 0 and
// 2 of near, 1 and 3 of far.
type pair struct {
	fabric    *standin.VerbsFabric
	near, far *Backend
	peer      *peer
	tag       uint64
	outcomes  map[uint64]error
}

// brisk has queue pairs fail soon. The clock of the test says how long a second is.
func brisk() Config { return Config{Timeout: ackUnit << 8, Retries: 1} }

// newPair connects two backends, which run by c where that is not nil. It runs while they close.
func newPair(t *testing.T, c *testClock, near, far Config) *pair {
	t.Helper()
	f, _ := standIn(t, 4)
	testkit.CheckLeaks(t, f.InUse)
	p := &pair{fabric: f, outcomes: map[uint64]error{}}
	for i, end := range []struct {
		cfg Config
		b   **Backend
	}{{near, &p.near}, {far, &p.far}} {
		if end.cfg.Devices == "" {
			end.cfg.Devices = []string{"fake0,fake2", "fake1,fake3"}[i]
		}
		if c == nil {
			*end.b = openFakeBackend(t, end.cfg)
			continue
		}
		end.cfg.clock, end.cfg.kernel = c, c.kernel
		b, err := newFake(t, end.cfg)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, c.during(t, b.Close)) })
		*end.b = b
	}
	p.use(t, p.connect(t))
	return p
}

// use has tests write to a peer, once its queue pairs are live: the next request is theirs then.
func (p *pair) use(t *testing.T, to *peer) {
	t.Helper()
	p.peer = to
	eventually(t, "live queue pairs", func() bool { return p.live() == len(p.near.rails) })
}

func openPair(t *testing.T, cfg Config) *pair { t.Helper(); return newPair(t, nil, cfg, cfg) }

// openClocked is openPair for two backends with a clock of their own.
func openClocked(t *testing.T, cfg Config) (*testClock, *pair) {
	t.Helper()
	c := newTestClock()
	return c, newPair(t, c, cfg, cfg)
}

// openOneRail connects two backends over one rail each, with memory at both.
func openOneRail(t *testing.T) (f *standin.VerbsFabric, c *testClock, p *pair, l, r *memory,
	remote uint32) {
	t.Helper()
	near, c := brisk(), newTestClock()
	near.Grace = graceMin
	far := near
	near.Devices, far.Devices = "fake0", "fake1"
	p = newPair(t, c, near, far)
	l, r = register(t, p.near, 1<<20), register(t, p.far, 1<<20)
	return p.fabric, c, p, l, r, p.imports(t, r)
}

func openFakeBackend(t *testing.T, cfg Config) *Backend {
	t.Helper()
	b, err := newFake(t, cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Errorf("close backend: %v", err)
		}
	})
	return b
}

// cut has nothing pass over a rail, or everything again.
func (p *pair) cut(rail int, cut bool) {
	frozen := uint32(0)
	if cut {
		frozen = 1
	}
	p.fabric.Device(2*rail+1).Set("frozen", frozen)
}

// port takes the near port of a rail down, or up again.
func (p *pair) port(rail int, up bool) { p.fabric.Device(2 * rail).SetLink(up) }

func (p *pair) connect(t *testing.T) *peer {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := p.near.Connect(ctx, p.far.Addr())
	require.NoError(t, err)
	return c.(*peer)
}

func register(t *testing.T, b *Backend, n int) *memory {
	t.Helper()
	m, err := b.Register(driver.Segment{Kind: driver.DRAM, Len: uint64(n), Mem: make([]byte, n),
		Secret: [16]byte{1}})
	require.NoError(t, err)
	return m.(*memory)
}

func (p *pair) imports(t *testing.T, m *memory) uint32 {
	t.Helper()
	token, err := m.AppendToken(nil)
	require.NoError(t, err)
	key, size, err := p.peer.Import(token)
	if err != nil || size != m.size {
		t.Fatalf("import: %d bytes, %v", size, err)
	}
	return key
}

// write submits a whole memory, with a message unless that is nil.
func (p *pair) write(t *testing.T, l *memory, remote uint32, msg []byte) (tag uint64) {
	t.Helper()
	p.tag++
	b := writeOf(driver.Desc{Len: l.size, LocalKey: l.key, RemoteKey: remote})
	if msg != nil {
		b.Tail, b.Notify = driver.NotifyTail, msg
	}
	require.NoError(t, p.peer.Submit(p.tag, b), "submit")
	return p.tag
}

func writeOf(descs ...driver.Desc) *driver.Batch {
	return &driver.Batch{Op: driver.Write, Descs: descs}
}

// await polls for the outcome of a tag.
func (p *pair) await(t *testing.T, tag uint64) error {
	t.Helper()
	var done [8]driver.Completion
	for end := time.Now().Add(patience); ; time.Sleep(50 * time.Microsecond) {
		n, err := p.near.Poll(done[:])
		require.NoError(t, err, "poll")
		for _, c := range done[:n] {
			if _, twice := p.outcomes[c.Tag]; twice {
				testkit.ErrorBroken(t, "tag %d completed twice", c.Tag)
			}
			p.outcomes[c.Tag] = c.Err
		}
		if err, ok := p.outcomes[tag]; ok {
			return err
		}
		if time.Now().After(end) {
			t.Fatalf("tag %d does not complete; %s", tag, p.peer.Explain(0, 0))
		}
	}
}

// received takes what a backend has.
func received(t *testing.T, b *Backend) []driver.Message {
	t.Helper()
	msgs := make([]driver.Message, 16)
	n, err := b.Receive(msgs)
	require.NoError(t, err)
	return msgs[:n]
}

func (p *pair) live() int {
	n := 0
	for _, s := range p.peer.mender.pairStates() {
		if s == pairLive {
			n++
		}
	}
	return n
}

// TestPairFails cuts one rail in mid-transfer: what it did not do the other does, and the
// queue pair comes back by itself.
func TestPairFails(t *testing.T) {
	p := openPair(t, brisk())
	l, r := register(t, p.near, 4<<20), register(t, p.far, 4<<20)
	remote := p.imports(t, r)
	for round := range 6 {
		for i := range l.bytes {
			l.bytes[i] = byte(i>>8 + i + round)
		}
		var tags []uint64
		for range 4 {
			tags = append(tags, p.write(t, l, remote, []byte{byte(round)}))
		}
		p.cut(round%2, true)
		for _, tag := range tags {
			if err := p.await(t, tag); err != nil {
				t.Fatalf("round %d: %v", round, err)
			}
		}
		if !bytes.Equal(l.bytes, r.bytes) {
			testkit.FatalBroken(t, "round %d: other bytes arrived", round)
		}
		p.cut(round%2, false)
		eventually(t, "a queue pair that comes back", func() bool { return p.live() == 2 })
	}
	got := 0
	eventually(t, "messages", func() bool {
		for _, m := range received(t, p.far) {
			if m.Err != nil || int(m.Data[0]) != got/4 {
				t.Errorf("message %d is %v (%v)", got, m.Data, m.Err)
			}
			got++
		}
		return got == 24
	})
}

// TestStaleFailure has the news that our queue pair failed come late: the owner's word that its own
// is broken came before, and the queue pair is made anew. The peer is not lost by it.
func TestStaleFailure(t *testing.T) {
	p := newPair(t, nil, Config{Devices: "fake0"}, Config{Devices: "fake1"})
	l, r := register(t, p.near, 1<<20), register(t, p.far, 1<<20)
	remote := p.imports(t, r)
	news := fakeOf(p.near).holdFailure(t)
	p.fabric.Device(0).Set("fail_status", 12)
	p.fabric.Device(0).Set("fail", 1)
	tag := p.write(t, l, remote, nil)
	<-news.taken
	require.NoError(t, p.far.endPairsOfKeyHolders())
	eventually(t, "the queue pair is made anew", func() bool {
		return p.peer.mender.pairStates()[0] == pairProbing
	})
	news.pass()
	require.NoError(t, p.await(t, tag))
	eventually(t, "a live queue pair", func() bool {
		require.NoError(t, p.peer.whyLost())
		return p.live() == 1
	})
}

// TestAllPairsFail has what is under way end with the peer's loss, in bounded time.
func TestAllPairsFail(t *testing.T) {
	c, p := openClocked(t, brisk())
	l, r := register(t, p.near, 1<<20), register(t, p.far, 1<<20)
	remote := p.imports(t, r)
	for rail := range 2 {
		p.cut(rail, true)
	}
	begin := c.Now()
	tag := p.write(t, l, remote, nil)
	if err := c.await(t, p, tag); !errors.Is(err, driver.ErrPeerLost) {
		t.Errorf("a write without a queue pair: %v", err)
	}
	require.Greater(t, c.since(begin), p.near.cfg.Failure)
	<-p.peer.Lost()
	if err := p.peer.Submit(99,
		writeOf(driver.Desc{Len: 1, LocalKey: l.key, RemoteKey: remote})); !errors.Is(err,
		driver.ErrPeerLost) {
		t.Errorf("submit to a lost peer: %v", err)
	}
	require.NoError(t, c.during(t, p.peer.Close))
	var msgs []driver.Message
	eventually(t, "the last word", func() bool {
		msgs = append(msgs, received(t, p.far)...)
		return len(msgs) > 0
	})
	if len(msgs) != 1 || !errors.Is(msgs[0].Err, driver.ErrPeerLost) {
		t.Errorf("messages of a peer that gave up: %+v", msgs)
	}
}

// TestOutage is shorter than Failure: the connection bears it.
func TestOutage(t *testing.T) {
	c, p := openClocked(t, brisk())
	l, r := register(t, p.near, 1<<20), register(t, p.far, 1<<20)
	remote := p.imports(t, r)
	for rail := range 2 {
		p.cut(rail, true)
	}
	tag := p.write(t, l, remote, nil)
	eventually(t, "no live queue pair", func() bool { return p.live() == 0 })
	c.runFor(t, p.near.cfg.Failure/2)
	for rail := range 2 {
		p.cut(rail, false)
	}
	if err := c.await(t, p, tag); err != nil {
		t.Errorf("a write over an outage: %v", err)
	}
}

// TestDeviceGone takes one device away for good, then the other.
func TestDeviceGone(t *testing.T) {
	// It says what becomes of its requests, or it does not.
	for _, how := range []uint32{1, 2} {
		t.Run(fmt.Sprint(how), func(t *testing.T) {
			p := openPair(t, brisk())
			l, r := register(t, p.near, 1<<20), register(t, p.far, 1<<20)
			remote := p.imports(t, r)
			for rail := range 2 {
				p.fabric.Device(2*rail).Set("fatal", how)
				p.tag++
				err := p.peer.Submit(p.tag, writeOf(driver.Desc{Len: 1 << 20, LocalKey: l.key,
					RemoteKey: remote}))
				if err == nil {
					err = p.await(t, p.tag)
				}
				if rail == 0 && err != nil || rail == 1 && !errors.Is(err, driver.ErrPeerLost) {
					t.Errorf("without %d devices: %v", rail+1, err)
				}
				eventually(t, "the rail is down", func() bool {
					return !p.near.rails[rail].usable()
				})
			}
		})
	}
}

// TestPortsDown has ports go down, which gives queue pairs nothing and fails nothing by itself:
// what waits goes over the other port.
func TestPortsDown(t *testing.T) {
	p := openPair(t, brisk())
	l, r := register(t, p.near, 1<<20), register(t, p.far, 1<<20)
	remote := p.imports(t, r)
	for round := range 4 {
		tag := p.write(t, l, remote, nil)
		p.port(round%2, false)
		require.NoError(t, p.await(t, tag), "with one port")
		eventually(t, "a failed queue pair", func() bool {
			return p.live() == 1 && !p.near.rails[round%2].usable()
		})
		p.port(round%2, true)
		eventually(t, "two live queue pairs", func() bool { return p.live() == 2 })
	}
}

// TestOwnerCloses closes the owner's backend in mid-transfer: what is under way ends, and at
// once, since the owner says that its queue pairs are gone.
func TestOwnerCloses(t *testing.T) {
	// so long is the quiet time that this must not wait for
	p := openPair(t, Config{Timeout: 20 * time.Second})
	l, r := register(t, p.near, 8<<20), register(t, p.far, 8<<20)
	remote := p.imports(t, r)
	var tags []uint64
	for range 8 {
		tags = append(tags, p.write(t, l, remote, nil))
	}
	begin := time.Now()
	require.NoError(t, p.far.Close())
	for _, tag := range tags {
		if err := p.await(t, tag); err != nil && !errors.Is(err, driver.ErrPeerLost) &&
			!errors.Is(err, driver.ErrRevoked) {
			t.Errorf("a write to a backend that closes: %v", err)
		}
	}
	<-p.peer.Lost()
	if took := time.Since(begin); took > patience {
		t.Errorf("the owner was gone after %v", took)
	}
	if _, _, err := p.peer.Import(nil); !errors.Is(err, driver.ErrPeerLost) {
		t.Errorf("import from a backend that is closed: %v", err)
	}
}

// TestConnectHangsUp ends a context while the owner is busy: the owner's program is told
// nothing of a connection that nobody had.
func TestConnectHangsUp(t *testing.T) {
	p := openPair(t, Config{})
	for range 20 {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Microsecond)
		if c, err := p.near.Connect(ctx, p.far.Addr()); err == nil {
			_ = c.Close()
			eventually(t, "its last word", func() bool { return len(received(t, p.far)) == 1 })
		}
		cancel()
	}
	eventually(t, "one connection", func() bool {
		p.far.mu.Lock()
		defer p.far.mu.Unlock()
		return p.far.admitted.Sum() == 1
	})
	if msgs := received(t, p.far); len(msgs) > 0 {
		t.Errorf("the owner was told %+v", msgs)
	}
}

// testClock is a clock that stands until a test moves it.
type testClock struct {
	*testkit.Clock
	gone atomic.Int64 // when all hosts stopped to acknowledge anything; 0: they did not
}

func newTestClock() *testClock { return &testClock{Clock: testkit.NewClock()} }

// partition has no host acknowledge anything any more.
func (c *testClock) partition() { c.gone.Store(c.Now()) }

// kernel implements Config.kernel.
func (c *testClock) kernel(conn syscall.RawConn) session.Outbound {
	if at := c.gone.Load(); at != 0 {
		return session.Outbound{Unacked: true, Pending: true, SinceAck: time.Duration(c.Now() - at)}
	}
	return session.QueryOutbound(conn)
}

// run moves the clock from timer to timer, as it moves for a process that runs, until a condition
// holds. A goroutine that is too slow to keep up sees a process that stood still.
func (c *testClock) run(t *testing.T, what string, ok func() bool) {
	t.Helper()
	eventually(t, what, func() bool {
		if ok() {
			return true
		}
		next := c.Next(clock.BeatMax)
		if next == clock.BeatMax { // no timer may be set
			next = clock.BeatMin
		}
		c.Jump(next)
		return false
	})
}

// during runs the clock until f returns.
func (c *testClock) during(t *testing.T, f func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- f() }()
	c.run(t, "a call returns", func() bool { return len(done) > 0 })
	return <-done
}

// await runs the clock until a batch ends.
func (c *testClock) await(t *testing.T, p *pair, tag uint64) error {
	t.Helper()
	return c.during(t, func() error { return p.await(t, tag) })
}

// awaitLost runs the clock until the peer is lost.
func (c *testClock) awaitLost(t *testing.T, p *pair) {
	t.Helper()
	c.run(t, "the peer is lost", func() bool { return p.peer.gone.Load() })
}

// runFor is run for some time.
func (c *testClock) runFor(t *testing.T, d time.Duration) {
	t.Helper()
	end := c.Now() + int64(d)
	c.run(t, "time passes", func() bool { return c.Now() >= end })
}

// since is how far the clock has moved.
func (c *testClock) since(begin int64) time.Duration { return time.Duration(c.Now() - begin) }

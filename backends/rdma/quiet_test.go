// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package rdma

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// muffler stands between a backend and an owner's control. When it is deaf it passes nothing
// on, and hangs up on nobody: as if the owner's program were frozen.
type muffler struct {
	listener net.Listener
	deaf     atomic.Bool
	passing  sync.WaitGroup
	over     chan struct{} // closed when the test has ended
}

func newMuffler(t *testing.T, owner netip.AddrPort) *muffler {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	m := &muffler{listener: l, over: make(chan struct{})}
	m.passing.Go(func() { m.serve(owner) })
	t.Cleanup(func() {
		_ = l.Close()
		close(m.over)
		m.passing.Wait()
	})
	return m
}

// serve passes one connection on.
func (m *muffler) serve(owner netip.AddrPort) {
	near, err := m.listener.Accept()
	if err != nil {
		return
	}
	far, err := net.Dial("tcp", owner.String())
	if err != nil {
		_ = near.Close()
		return
	}
	m.passing.Go(func() { m.pass(near, far) })
	m.passing.Go(func() {
		<-m.over
		_, _ = near.Close(), far.Close()
	})
	m.pass(far, near)
}

// pass ends with either side, unless it is deaf.
func (m *muffler) pass(from, to net.Conn) {
	defer to.Close()
	var buf [4096]byte
	for {
		n, err := from.Read(buf[:])
		if err != nil && m.deaf.Load() {
			<-m.over
		}
		if err != nil {
			return
		}
		if !m.deaf.Load() {
			_, _ = to.Write(buf[:n]) // who has hung up is seen by Read
		}
	}
}

// muffle connects once more, through a muffler.
func (p *pair) muffle(t *testing.T) *muffler {
	t.Helper()
	a := p.far.address
	m := newMuffler(t, a.control[0])
	a.control = []netip.AddrPort{m.listener.Addr().(*net.TCPAddr).AddrPort()}
	addr, err := a.encode()
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := p.near.Connect(ctx, addr)
	require.NoError(t, err)
	p.use(t, c.(*peer))
	return m
}

// TestOwnerThatDoesNotAnswer has all queue pairs fail with a write and a read under way, and an
// owner that does not say that its own have ended. What the write sent may land still, unless the
// fabric is known to keep no packet for so long. The read has no more to do with the owner.
func TestOwnerThatDoesNotAnswer(t *testing.T) {
	ends := map[string]func(t *testing.T, c *testClock, p *pair) error{
		"lost": func(t *testing.T, c *testClock, p *pair) error {
			c.partition()
			c.awaitLost(t, p)
			return driver.ErrPeerLost
		},
		"closed": func(t *testing.T, c *testClock, p *pair) error {
			require.NoError(t, c.during(t, p.peer.Close))
			return driver.ErrClosed
		},
	}
	for name, end := range ends {
		for _, life := range []time.Duration{0, 3 * time.Second} {
			t.Run(fmt.Sprint(name, life), func(t *testing.T) {
				c, p := openClocked(t, Config{PacketLife: life})
				owner := p.muffle(t)
				p.peer.link.(*meddledLink).noteTimes(c)
				write, read := p.underWay(t, owner)
				want := end(t, c, p)
				err := c.await(t, p, write)
				require.ErrorIs(t, err, want)
				if errors.Is(err, driver.ErrUnproven) != (life == 0) {
					testkit.ErrorBroken(t, "a write ends with %v", err)
				}
				err = c.await(t, p, read)
				require.ErrorIs(t, err, want)
				require.NotErrorIs(t, err, driver.ErrUnproven)
				link := p.peer.link.(*meddledLink)
				link.mu.Lock()
				waited := time.Duration(link.over - link.pairOver)
				link.mu.Unlock()
				if least := p.near.cfg.Grace + life; waited < least {
					testkit.ErrorBroken(t, "they ended %v after the queue pairs, want %v at least",
						waited, least)
				}
			})
		}
	}
}

// underWay submits a write and a read to an owner that says no more, over rails that carry nothing.
func (p *pair) underWay(t *testing.T, owner *muffler) (write, read uint64) {
	t.Helper()
	l, r := register(t, p.near, 100), register(t, p.far, 100)
	remote := p.imports(t, r)
	owner.deaf.Store(true)
	for rail := range 2 {
		p.cut(rail, true)
	}
	write = p.write(t, l, remote, nil)
	p.tag++
	b := writeOf(driver.Desc{Len: l.size, LocalKey: l.key, RemoteKey: remote})
	b.Op = driver.Read
	require.NoError(t, p.peer.Submit(p.tag, b))
	return write, p.tag
}

// silent has an owner that says nothing and a wire that carries nothing.
func silent(t *testing.T, cfg Config) (c *testClock, p *pair, write func() (tag uint64)) {
	t.Helper()
	c, p = openClocked(t, cfg)
	owner := p.muffle(t)
	l, r := register(t, p.near, 100), register(t, p.far, 100)
	remote := p.imports(t, r)
	owner.deaf.Store(true)
	for rail := range 2 {
		p.port(rail, false) // the queue pairs fail by themselves
	}
	c.run(t, "no live queue pair", func() bool { return p.live() == 0 })
	return c, p, func() uint64 { return p.write(t, l, remote, nil) }
}

// TestSilenceIsNotDeath has an owner that is silent for much longer than Config.Failure: it is not
// lost, whether something waits or not. Once its host acknowledges nothing, what waits ends after
// Config.Failure, and no sooner.
func TestSilenceIsNotDeath(t *testing.T) {
	for _, unseen := range []time.Duration{clock.BeatMax - time.Millisecond, time.Hour} {
		t.Run(unseen.String(), func(t *testing.T) {
			c, p, write := silent(t, Config{})
			c.runFor(t, 4*p.near.cfg.Failure)
			require.NoError(t, p.peer.whyLost(), "lost, although nothing waits")
			c.Jump(unseen)
			tag := write()
			c.runFor(t, 4*p.near.cfg.Failure)
			require.NoError(t, p.peer.whyLost(), "lost, although its host answers")
			begin := c.Now()
			c.partition()
			c.runFor(t, p.near.cfg.Failure)
			require.NoError(t, p.peer.whyLost(), "lost before its time")
			require.ErrorIs(t, c.await(t, p, tag), driver.ErrPeerLost)
			require.Greater(t, c.since(begin), p.near.cfg.Failure)
		})
	}
}

// TestBlipBesideASilentOwner takes all ports down for less than a NIC tries: no queue pair ends, so
// what waits needs no word of an owner that stands still. Ports that stay down end them.
func TestBlipBesideASilentOwner(t *testing.T) {
	c, p := openClocked(t, Config{})
	owner := p.muffle(t)
	l, r := register(t, p.near, 100), register(t, p.far, 100)
	remote := p.imports(t, r)
	owner.deaf.Store(true)
	least, _ := p.near.cfg.FailureTime()
	ports := func(up bool) {
		for rail := range 2 {
			p.port(rail, up)
			eventually(t, "the news of a port", func() bool {
				return p.near.rails[rail].usable() == up
			})
		}
	}
	for range 4 { // together longer than least
		ports(false)
		tag := p.write(t, l, remote, nil)
		c.runFor(t, least/2)
		require.Equal(t, 2, p.live())
		ports(true)
		require.NoError(t, p.await(t, tag))
	}
	ports(false)
	begin := c.Now()
	c.run(t, "no live queue pair", func() bool { return p.live() == 0 })
	require.GreaterOrEqual(t, c.since(begin), least)
}

// TestStandstillIsNotSilence stops our own process while a write waits for an owner that is silent:
// what is left of the owner's time is left when the process goes on.
func TestStandstillIsNotSilence(t *testing.T) {
	c, p, write := silent(t, Config{})
	begin, tag := c.Now(), write()
	c.partition()
	for range 3 {
		c.runFor(t, p.near.cfg.Failure/4)
		c.Jump(time.Hour)
	}
	require.NoError(t, p.peer.whyLost(), "lost by a standstill of our own")
	require.ErrorIs(t, c.await(t, p, tag), driver.ErrPeerLost)
	require.Greater(t, c.since(begin), 3*time.Hour+p.near.cfg.Failure)
}

// TestStandstillOfImport stops our own process while an import waits for an owner that is frozen,
// and then for one whose host is gone.
func TestStandstillOfImport(t *testing.T) {
	c, p := openClocked(t, Config{})
	owner := p.muffle(t)
	token, err := register(t, p.far, 100).AppendToken(nil)
	require.NoError(t, err)
	owner.deaf.Store(true)
	for _, want := range []error{driver.ErrTimeout, driver.ErrPeerLost} {
		limit := session.ImportMax
		if want == driver.ErrPeerLost {
			c.partition()
			limit = p.near.cfg.Failure
		}
		begin := c.Now()
		imported := make(chan error, 1)
		go func() {
			_, _, err := p.peer.Import(token)
			imported <- err
		}()
		c.runFor(t, limit/2)
		c.Jump(time.Hour)
		c.run(t, "the import ends", func() bool { return len(imported) > 0 })
		require.ErrorIs(t, <-imported, want)
		require.GreaterOrEqual(t, c.since(begin), time.Hour+limit)
	}
	require.NoError(t, c.during(t, p.peer.Close))
}

// TestImportThatIsNeverAnswered has an owner that says something now and then, and never answers.
func TestImportThatIsNeverAnswered(t *testing.T) {
	c, p := openClocked(t, Config{})
	owner := p.muffle(t)
	token, err := register(t, p.far, 100).AppendToken(nil)
	require.NoError(t, err)
	owner.deaf.Store(true)
	begin := c.Now()
	imported := make(chan error, 1)
	go func() {
		_, _, err := p.peer.Import(token)
		imported <- err
	}()
	for c.since(begin) < (importsMax-1)*session.ImportMax {
		c.runFor(t, session.ImportMax/2)
		p.peer.ch.heard.Add(1)
		require.Empty(t, imported)
	}
	c.run(t, "the import ends", func() bool {
		p.peer.ch.heard.Add(1)
		return len(imported) > 0
	})
	require.ErrorIs(t, <-imported, driver.ErrTimeout)
	require.NoError(t, c.during(t, p.peer.Close))
}

// TestHostOfNoTransfer is gone, and given up by both ends although nothing waits for it.
func TestHostOfNoTransfer(t *testing.T) {
	c, p := openClocked(t, Config{Failure: 100 * time.Millisecond})
	c.runFor(t, 2*session.IdleFailures*p.near.cfg.Failure)
	require.NoError(t, p.peer.whyLost())
	c.partition()
	c.runFor(t, (session.IdleFailures-2)*p.near.cfg.Failure)
	require.NoError(t, p.peer.whyLost(), "lost before its time")
	c.awaitLost(t, p)
	eventually(t, "the owner's end is gone", func() bool {
		p.far.mu.Lock()
		defer p.far.mu.Unlock()
		return len(p.far.accepted) == 0
	})
}

// TestOwnerThatHangsUp does so on the first hello, which it heard too late, or because too many
// wait: Connect comes again.
func TestOwnerThatHangsUp(t *testing.T) {
	p := openPair(t, Config{})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	a := p.far.address
	a.control = []netip.AddrPort{l.Addr().(*net.TCPAddr).AddrPort()}
	addr, err := a.encode()
	require.NoError(t, err)
	var relay sync.WaitGroup
	relay.Go(func() {
		first, err := l.Accept()
		if err != nil {
			return
		}
		_ = first.Close()
		near, err := l.Accept()
		if err != nil {
			return
		}
		far, err := net.Dial("tcp", p.far.address.control[0].String())
		if err != nil {
			t.Error(err)
			return
		}
		relay.Go(func() { _, _ = io.Copy(far, near); _ = far.Close() })
		_, _ = io.Copy(near, far)
		_ = near.Close()
	})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	c, err := p.near.Connect(ctx, addr)
	cancel()
	require.NoError(t, err)
	require.NoError(t, c.Close())
	require.NoError(t, l.Close())
	relay.Wait()
}

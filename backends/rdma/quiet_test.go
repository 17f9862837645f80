// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// muffler stands between a backend and an owner's control. When it is deaf it passes nothing
// on, and hangs up on nobody: as if the owner's program were frozen.
type muffler struct {
	listener net.Listener
	deaf     atomic.Bool
	passing  sync.WaitGroup
}

func newMuffler(t *testing.T, owner netip.AddrPort) *muffler {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	m := &muffler{listener: l}
	m.passing.Go(func() { m.serve(owner) })
	t.Cleanup(func() {
		_ = l.Close()
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
	m.pass(far, near)
}

// pass ends with either side.
func (m *muffler) pass(from, to net.Conn) {
	defer to.Close()
	var buf [4096]byte
	for {
		n, err := from.Read(buf[:])
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
	p.peer = c.(*peer)
	return m
}

// TestQuietTime has all queue pairs fail with a write under way, and an owner that does not answer:
// then nothing but time proves that what was sent has landed or is lost, so the write ends no
// sooner.
func TestQuietTime(t *testing.T) {
	const grace = 100 * time.Millisecond
	for name, c := range map[string]struct {
		failure time.Duration
		end     func(p *peer)
		beside  time.Duration // how long the owner is waited for first
		want    error
	}{
		"lost": {failure: 300 * time.Millisecond, end: func(p *peer) {
			<-p.Lost()
		}, want: driver.ErrPeerLost},
		"closed": {end: func(p *peer) { _ = p.Close() }, beside: grace, want: driver.ErrClosed},
	} {
		t.Run(name, func(t *testing.T) {
			p := openPair(t, Config{Timeout: 20 * time.Millisecond, Retries: 1, Grace: grace,
				Failure: c.failure})
			owner := p.muffle(t)
			l, r := register(t, p.near, 100), register(t, p.far, 100)
			remote := p.imports(t, r)
			owner.deaf.Store(true)
			for rail := range 2 {
				fakeOf(p.near).cut(rail, true)
			}
			tag := p.write(t, l, remote, nil)
			c.end(p.peer)
			if err := p.await(t, tag); !errors.Is(err, c.want) {
				t.Errorf("the write ended with %v, want %v", err, c.want)
			}
			link := p.peer.link.(*fakeLink)
			link.mu.Lock()
			waited := link.over.Sub(link.pairOver)
			link.mu.Unlock()
			if least := c.beside + 2*p.near.cfg.ackTimeout(); waited < least {
				t.Errorf("it was given up %v after its queue pairs had ended, want %v at least",
					waited, least)
			}
		})
	}
}

// TestSilenceIsNotDeath has an owner that says nothing and a wire that carries nothing, for
// much longer than Config.Failure: as long as nothing waits the peer is not lost.
// What waits ends within about Config.Failure.
func TestSilenceIsNotDeath(t *testing.T) {
	p := openPair(t, Config{
		Timeout: 20 * time.Millisecond, Retries: 1,
		Grace: 100 * time.Millisecond, Failure: 400 * time.Millisecond,
	})
	owner := p.muffle(t)
	l, r := register(t, p.near, 100), register(t, p.far, 100)
	remote := p.imports(t, r)
	fake := fakeOf(p.near)
	eventually(t, "two live queue pairs", func() bool { return p.live() == 2 })
	owner.deaf.Store(true)
	for rail := range 2 {
		fake.port(rail, false) // the queue pairs fail by themselves
	}
	eventually(t, "no live queue pair", func() bool { return p.live() == 0 })
	select {
	case <-p.peer.Lost():
		t.Fatalf("lost, although nothing waits: %v", p.peer.whyLost())
	case <-time.After(4 * p.near.cfg.Failure):
	}
	begin := time.Now()
	err := p.await(t, p.write(t, l, remote, nil))
	require.ErrorIs(t, err, driver.ErrPeerLost)
	require.Greater(t, time.Since(begin), p.near.cfg.Failure/2)
}

// TestFrozenImport has an owner's program that is frozen: an import waits for Config.Failure.
func TestFrozenImport(t *testing.T) {
	p := openPair(t, Config{Grace: 20 * time.Millisecond, Failure: 400 * time.Millisecond})
	owner := p.muffle(t)
	token, err := register(t, p.far, 100).AppendToken(nil)
	require.NoError(t, err)
	owner.deaf.Store(true)
	begin := time.Now()
	_, _, err = p.peer.Import(token)
	require.ErrorIs(t, err, driver.ErrPeerLost)
	require.ErrorIs(t, err, driver.ErrTimeout)
	require.Greater(t, time.Since(begin), p.near.cfg.Failure)
	require.NoError(t, p.peer.Close())
}

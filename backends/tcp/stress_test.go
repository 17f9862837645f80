// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"bytes"
	"context"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

const (
	movers    = 4
	plotBytes = 4 << 20
	untouched = 0x5A
)

// stress is what a stress of tcp is made of. Its pauses and those of its networks are by its clock,
// where all that takes time takes scale times as long.
type stress struct {
	clock clock.Clock
	scale time.Duration
	seed  uint64
	more  func() bool // whether a mover begins another round
	cfg   Config

	landed atomic.Int64 // revokes that came while bytes were landing

	receiving sync.Mutex
}

// receive takes all messages that have come: none may hold the place of a connection that ended.
func (s *stress) receive(owner *Backend) {
	s.receiving.Lock()
	defer s.receiving.Unlock()
	var msgs [64]driver.Message
	for n := 1; n > 0; {
		n, _ = owner.Receive(msgs[:])
	}
}

// gateStress is a few rounds of one seed, while the clock runs 20 times as fast as the host's.
func gateStress(t *testing.T) *stress {
	var rounds atomic.Int64
	return &stress{
		clock: running(t, 20*time.Millisecond), scale: 20, seed: 7,
		more: func() bool { return rounds.Add(1) <= 20 },
		cfg:  Config{Grace: 2 * time.Second, Failure: 10 * time.Second},
	}
}

func upTo(r *rand.Rand, most time.Duration) time.Duration {
	return time.Duration(r.Int64N(int64(most)))
}

// pause sleeps for up to most.
func (s *stress) pause(r *rand.Rand, most time.Duration) { s.clock.Sleep(s.scale * upTo(r, most)) }

// later is the time of the clock once d has passed.
func (s *stress) later(d time.Duration) int64 { return s.clock.Now() + int64(s.scale*d) }

var blank = bytes.Repeat([]byte{untouched}, plotBytes)

// late counts bytes that a transfer of before has put where all was untouched.
func late(mem []byte) int { return len(mem) - bytes.Count(mem, blank[:1]) }

// disturb changes a network at random, loses for a while all that goes one way, or cuts it at
// one end or both, politely or not.
func (s *stress) disturb(x *network, r *rand.Rand) {
	x.delay.Store(int64(s.scale * upTo(r, 60*time.Millisecond)))
	x.rate.Store(0)
	switch r.IntN(7) {
	case 0:
		x.rate.Store((1<<20 + r.Int64N(8<<20)) / int64(s.scale))
	case 1:
		x.cut()
	case 6: // longer than Grace, and than Failure of some
		x.lost[r.IntN(2)].Store(s.later(upTo(r, 800*time.Millisecond)))
	case 2, 3: // one end alone: what is on its way still arrives at the other
		x.mu.Lock()
		defer x.mu.Unlock()
		for i, c := range x.conns {
			tcp, ok := c.(*net.TCPConn)
			if ok && i%2 == r.IntN(2) {
				_ = tcp.SetLinger(r.IntN(2) - 1)
				_ = tcp.Close()
			}
		}
	}
}

// randomBatch is a write or a read of all of a plot, in one of several shapes.
func randomBatch(r *rand.Rand, op driver.Op, local, remote uint32) *driver.Batch {
	b := &driver.Batch{Op: op}
	switch r.IntN(3) {
	case 0:
		b.Descs = []driver.Desc{{Len: plotBytes, LocalKey: local, RemoteKey: remote}}
	case 1:
		const run = 1000
		g := &driver.Pattern{Run: run, Count: plotBytes / run, LocalKey: local, RemoteKey: remote}
		g.Local, g.Remote = driver.Side{Stride: run}, driver.Side{Stride: run}
		for _, i := range r.Perm(g.Count) {
			g.Remote.List = append(g.Remote.List, uint32(i))
		}
		b.Pattern = g
	default:
		at := r.Uint64N(plotBytes / 2)
		b.Descs = []driver.Desc{{Local: at, Remote: at, Len: 1 + r.Uint64N(plotBytes/2),
			LocalKey: local, RemoteKey: remote}}
	}
	if op == driver.Write && r.IntN(3) == 0 {
		b.Tail = driver.NotifyTail
	}
	return b
}

// TestStressEndsAreFinal: transfers end by Cancel, by Close, or by the loss of the network, while
// it delays, throttles, and is cut at either end. Once all transfers of a peer have ended, not a
// byte of them lands.
func TestStressEndsAreFinal(t *testing.T) { gateStress(t).endsAreFinal(t) }

func (s *stress) endsAreFinal(t *testing.T) {
	owner := openBy(t, s.clock, s.cfg)
	var all sync.WaitGroup
	for i := range uint64(movers) {
		all.Go(func() {
			r := rand.New(rand.NewPCG(s.seed, i))
			near := openBy(t, s.clock, s.cfg)
			far, away := share(t, owner, plotBytes)
			m, local := share(t, near, plotBytes)
			x := newNetwork(t, owner)
			for !t.Failed() && s.more() {
				s.endsOnce(t, r, near, x, far, m.key, away, local)
				s.receive(owner)
			}
		})
	}
	all.Wait()
}

func (s *stress) endsOnce(t *testing.T, r *rand.Rand, near *Backend, x *network, far *memory,
	key uint32, away, local []byte) {
	x.delay.Store(0)
	x.rate.Store(0)
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	connected, err := near.Connect(ctx, x.addr)
	if err != nil {
		return // the network was cut behind us
	}
	p := connected.(*peer)
	token, _ := far.AppendToken(nil)
	remote, _, err := p.Import(token)
	op := []driver.Op{driver.Write, driver.Read}[r.IntN(2)]
	from, to := local, away
	if op == driver.Read {
		from, to = away, local
	}
	fill(from, byte(r.IntN(untouched)))
	tags := uint64(0)
	for ; err == nil && tags < 4; tags++ {
		if err = p.Submit(tags, randomBatch(r, op, key, remote)); err != nil {
			break
		}
	}
	s.pause(r, 10*time.Millisecond)
	s.disturb(x, r)
	s.pause(r, 10*time.Millisecond)
	if r.IntN(2) == 0 {
		for tag := range tags {
			p.Cancel(tag)
		}
	} else {
		_ = p.Close()
	}
	var done [4]driver.Completion
	ended := uint64(0)
	for until := s.later(3 * limit); ended < tags &&
		s.clock.Now() < until; time.Sleep(50 * time.Microsecond) {
		n, _ := near.Poll(done[:])
		ended += uint64(n)
	}
	if ended < tags {
		t.Errorf("%d of %d transfers have ended", ended, tags)
		return // what is under way may land
	}
	copy(to, blank) // at once: what lands late must not be covered
	s.pause(r, 120*time.Millisecond)
	if n := late(to); n > 0 {
		testkit.ErrorBroken(t, "%d bytes of a %v landed after its end", n, op)
	}
	_ = p.Close()
}

// TestStressRevokes: movers write by way of a network that delays, throttles and is cut. Once
// Revoke has returned, not a byte lands by an earlier token.
func TestStressRevokes(t *testing.T) {
	s := gateStress(t)
	stop := make(chan struct{})
	var orders [movers]atomic.Pointer[[2][]byte]
	var all sync.WaitGroup
	defer all.Wait()
	defer close(stop)
	for i := range orders {
		b := openBy(t, s.clock, s.cfg)
		m, _ := share(t, b, plotBytes)
		all.Go(func() { move(b, m.key, &orders[i], stop, uint64(i)) })
	}
	s.revokes(t, limit, func(i int, addr, token []byte) {
		orders[i].Store(&[2][]byte{addr, token})
	})
	require.Equal(t, int64(20), s.landed.Load())
}

// revokes has each mover be given an order again and again. Before each revoke it waits up to wait
// until bytes are landing.
func (s *stress) revokes(t *testing.T, wait time.Duration, order func(i int, addr, token []byte)) {
	t.Helper()
	owner := openBy(t, s.clock, s.cfg)
	var all sync.WaitGroup
	for i := range movers {
		all.Go(func() {
			r := rand.New(rand.NewPCG(s.seed, uint64(i)))
			m, mem := share(t, owner, plotBytes)
			x := newNetwork(t, owner)
			for !t.Failed() && s.more() {
				copy(mem[:4096], blank)
				again, err := owner.Register(m.seg)
				if err != nil {
					t.Error(err)
					return
				}
				m := again.(*memory)
				token, err := m.AppendToken(nil)
				if err != nil {
					t.Error(err)
					return
				}
				x.delay.Store(0)
				x.rate.Store(0)
				order(i, x.addr, token)
				if s.revokeOnce(t, r, owner, wait, x, m, mem) {
					s.landed.Add(1)
				}
				s.receive(owner)
			}
		})
	}
	all.Wait()
}

// revokeOnce reports whether bytes were landing when the revoke came.
func (s *stress) revokeOnce(t *testing.T, r *rand.Rand, owner *Backend, wait time.Duration,
	x *network, m *memory, mem []byte) bool {
	landed := false
	for until := s.later(wait); !landed && s.clock.Now() < until; time.Sleep(time.Millisecond) {
		m.gate.Lock() // the look is between two pieces
		landed = late(mem[:4096]) > 0
		m.gate.Unlock()
	}
	s.disturb(x, r)
	s.pause(r, 5*time.Millisecond)
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if err := m.Revoke(ctx); err != nil {
		t.Errorf("revoke: %v", err)
	}
	copy(mem, blank) // at once: what lands late must not be covered
	s.pause(r, 20*time.Millisecond)
	if n := late(mem); n > 0 {
		testkit.ErrorBroken(t, "%d bytes landed after a revoke", n)
	}
	return landed
}

// move writes by the latest order until stop is closed. It connects anew for each, and whenever its
// peer is lost.
func move(b *Backend, local uint32, orders *atomic.Pointer[[2][]byte], stop chan struct{},
	seed uint64) {
	r := rand.New(rand.NewPCG(seed, seed))
	for {
		select {
		case <-stop:
			return
		default:
			time.Sleep(time.Millisecond)
		}
		if o := orders.Load(); o != nil {
			moveBy(b, r, o, orders, stop, local)
		}
	}
}

func moveBy(b *Backend, r *rand.Rand, o *[2][]byte, orders *atomic.Pointer[[2][]byte],
	stop chan struct{}, local uint32) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	p, err := b.Connect(ctx, o[0])
	if err != nil {
		return
	}
	defer p.Close()
	remote, _, err := p.Import(o[1])
	var done [8]driver.Completion
	for tag := uint64(0); err == nil; {
		select {
		case <-stop:
			return
		default:
		}
		if err = p.Submit(tag, randomBatch(r, driver.Write, local, remote)); err == nil {
			tag++
		}
		if tag >= 8 { // let some of them end
			time.Sleep(100 * time.Microsecond)
		}
		for n, _ := b.Poll(done[:]); n > 0; n, _ = b.Poll(done[:]) {
			for _, c := range done[:n] {
				if c.Err != nil && orders.Load() != o {
					return // revoked, and there is another order
				}
			}
		}
	}
}

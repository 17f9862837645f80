// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"bytes"
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

// network relays connections to an owner. Each way brings what it was given a while later, at no
// more than a rate, and stands still now and then, as TCP does that has lost a packet.
type network struct {
	clock clock.Clock     // the owner's
	over  chan struct{}   // closed when the test ends
	addr  []byte          // the owner's, at this end
	delay atomic.Int64    // of each way, in nanoseconds
	stall atomic.Int64    // once in 50 pieces
	rate  atomic.Int64    // bytes a second; 0: any
	lost  [2]atomic.Int64 // until when nothing comes through, to the owner and from it

	mu    sync.Mutex
	conns []net.Conn
}

func newNetwork(t *testing.T, owner *Backend) *network {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	x := &network{clock: owner.clock, over: make(chan struct{})}
	a := owner.address
	a.places = []string{l.Addr().String()}
	x.addr, err = a.encode()
	require.NoError(t, err)
	var all sync.WaitGroup
	t.Cleanup(func() { close(x.over); _ = l.Close(); x.cut(); all.Wait() })
	all.Go(func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", owner.listener.Addr().String())
			if err != nil {
				_ = near.Close()
				continue
			}
			x.mu.Lock()
			x.conns = append(x.conns, near, far)
			x.mu.Unlock()
			all.Go(func() { x.relay(far, near, &x.lost[0]) })
			all.Go(func() { x.relay(near, far, &x.lost[1]) })
		}
	})
	return x
}

// cut closes all connections at both ends.
func (x *network) cut() {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, c := range x.conns {
		_ = c.Close()
	}
	x.conns = nil
}

func slowNetwork(t *testing.T, owner *Backend, delay, stall time.Duration) []byte {
	t.Helper()
	x := newNetwork(t, owner)
	x.delay.Store(int64(delay))
	x.stall.Store(int64(stall))
	return x.addr
}

// sleepUntil returns earlier where the test ends.
func (x *network) sleepUntil(due int64) {
	left := time.Duration(due - x.clock.Now())
	if left <= 0 {
		return
	}
	awake, timer := clock.After(x.clock, left)
	defer timer.Stop()
	select {
	case <-awake:
	case <-x.over:
	}
}

func (x *network) relay(to, from net.Conn, lost *atomic.Int64) {
	type packet struct {
		due  int64
		data []byte
	}
	queue := make(chan packet, 64)
	over := make(chan struct{})
	go func() {
		defer close(over)
		defer to.Close()
		for p := range queue {
			x.sleepUntil(p.due)
			x.sleepUntil(lost.Load()) // TCP sends again what was lost
			if rate := x.rate.Load(); rate > 0 {
				took := time.Duration(len(p.data)) * time.Second / time.Duration(rate)
				x.sleepUntil(x.clock.Now() + int64(took))
			}
			if _, err := to.Write(p.data); err != nil {
				break
			}
		}
		for range queue { // until the reader has noticed
		}
	}()
	defer func() { <-over }()
	defer close(queue)
	defer from.Close()
	for i := 0; ; i++ {
		data := make([]byte, 64<<10)
		n, err := from.Read(data)
		if err != nil || n == 0 {
			return
		}
		if i%50 == 49 {
			x.sleepUntil(x.clock.Now() + x.stall.Load())
		}
		queue <- packet{x.clock.Now() + x.delay.Load(), data[:n]}
	}
}

// A line on which bytes are older than Grace most of the time costs time, and nothing else.
func TestSlowNetwork(t *testing.T) {
	testkit.CheckLeaks(t)
	const n = 8 << 20
	clock, cfg := running(t, 40*time.Millisecond), Config{Grace: 2 * time.Second}
	owner, near := openBy(t, clock, cfg), openBy(t, clock, cfg)
	m, away := share(t, owner, n)
	l, local := share(t, near, n)
	p := dial(t, near, slowNetwork(t, owner, 400*time.Millisecond, 2400*time.Millisecond))
	require.GreaterOrEqual(t, p.grace, int64(cfg.Grace+800*time.Millisecond), "and a round trip")
	key := importKey(t, p, m)
	for round, op := range []driver.Op{driver.Write, driver.Read, driver.Write} {
		fill(local, byte(10+round))
		want := byte(10 + round)
		if op == driver.Read {
			fill(away, 99)
			want = 99
		}
		for i := range uint64(8) {
			d := []driver.Desc{{Local: i * n / 8, Remote: i * n / 8, Len: n / 8, LocalKey: l.key,
				RemoteKey: key}}
			require.NoError(t, p.Submit(i, &driver.Batch{Op: op, Descs: d}))
		}
		ended := map[uint64]error{}
		var done [8]driver.Completion
		for end := time.Now().Add(3 * limit); len(ended) < 8 &&
			time.Now().Before(end); time.Sleep(time.Millisecond) {
			k, _ := near.Poll(done[:])
			for _, c := range done[:k] {
				ended[c.Tag] = c.Err
				if c.Err != nil {
					t.Errorf("%v over a slow network: %v", op, c.Err)
				}
			}
		}
		if len(ended) < 8 {
			t.Fatalf("%v over a slow network: %d of 8 completed", op, len(ended))
		}
		if bytes.Count(local, []byte{want}) != n || !bytes.Equal(local, away) {
			t.Errorf("%v over a slow network: the bytes differ", op)
		}
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

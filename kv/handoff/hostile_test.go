// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// TestGarbageDoesNotDisturbOthers sends both sides what no honest peer sends,
// while requests are handed over.
func TestGarbageDoesNotDisturbOthers(t *testing.T) { over(t, garbageDoesNotDisturbOthers) }

func garbageDoesNotDisturbOthers(t *testing.T, open func(testing.TB) driver.Backend) {
	p := newPair(t, setup{backend: open, blocks: 8, receiver: func(c *ReceiverConfig) {
		c.IdleTimeout = 5 * time.Second // on one CPU garbage keeps honest messages waiting
	}})
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		r := rand.New(rand.NewPCG(5, 6))
		for {
			select {
			case <-stop:
				return
			default:
			}
			for _, b := range messages() {
				b[r.IntN(len(b))] ^= byte(1 << r.IntN(8))
				_ = p.prefill.peer.Notify(within(t), b)
				_ = p.decode.peer.Notify(within(t), b)
			}
		}
	}()
	start := time.Now()
	for n := uint64(0); n < 20 || p.receiver.Stats().Strays < 100 &&
		time.Since(start) < limit; n++ {
		p.handOverAmong(t, n)
	}
	close(stop)
	<-stopped
	await(t, "half-begun requests end", func() bool { return p.pool.Stats().Used == 0 })
	if s := p.receiver.Stats(); s.Strays == 0 {
		t.Errorf("no garbage arrived: %+v", s)
	}
}

// handOverAmong is handOver where others may be accepted too.
func (p *pair) handOverAmong(t *testing.T, number uint64) {
	t.Helper()
	push, err := p.sender.Begin(within(t), p.prefill.peer, number, p.request(t, 1, 2, number+100))
	require.NoError(t, err)
	p.push(t, push)
	for {
		q, err := p.receiver.Accept(within(t))
		require.NoError(t, err)
		<-q.Done()
		q.Release()
		if q.ID == number && q.Err() == nil {
			return
		}
	}
}

// TestBrokenProtocolEndsTheRequest has a sender that offers once more what is open.
func TestBrokenProtocolEndsTheRequest(t *testing.T) {
	p := newPair(t, setup{})
	push, q := p.begin(t, 1, 1, 2)
	require.NoError(t, push.Layer(within(t), 0))
	<-q.Ready()
	again := append(appendHeader(nil, toReceiver, kindBegin, 0, q.session), 1, 0, 0, 0, 0, 0, 0, 0,
		'x')
	require.NoError(t, p.prefill.peer.Notify(within(t), again))
	<-q.Done()
	<-push.Ended()
	if !errors.Is(q.Err(), engine.ErrCorrupt) || !errors.Is(push.Err(), engine.ErrCorrupt) {
		t.Errorf("receiver: %v, sender: %v", q.Err(), push.Err())
	}
	q.Release()
}

// TestMuxDealsOut: what is not of this package goes to the program, if that wants it.
func TestMuxDealsOut(t *testing.T) {
	p := newPair(t, setup{})
	got := make(chan string, 8)
	p.send(t, "x1") // no handler yet
	p.decode.mux.HandleRest(func(n engine.Notification) { got <- string(n.Data) })
	p.send(t, "x2")
	require.Equal(t, "x2", <-got)
	require.Empty(t, got)
}

// send sends a message and waits until the Mux has dealt with it.
func (p *pair) send(t *testing.T, msg string) {
	t.Helper()
	require.NoError(t, p.prefill.peer.Notify(within(t), []byte(msg)))
	p.handOver(t, 99).Release() // an empty request is behind it in the queue
}

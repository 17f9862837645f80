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
	"github.com/sluicehq/sluice/internal/testing/testkit"
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

// TestBrokenProtocolEndsTheRequest has a sender that does what it must not.
func TestBrokenProtocolEndsTheRequest(t *testing.T) {
	for what, send := range map[string]func(session uint64) []byte{
		"a layer that is not there": func(s uint64) []byte {
			return appendLayer(nil, s, small.Layers)
		},
		"a layer number too large": func(s uint64) []byte { return appendLayer(nil, s, 1<<31) },
		"a layer twice":            func(s uint64) []byte { return appendLayer(nil, s, 0) },
		"a begin once more": func(s uint64) []byte {
			return append(appendHeader(nil, toReceiver, kindBegin, 0, s), 1, 0, 0, 0, 0, 0, 0, 0,
				'x')
		},
	} {
		t.Run(what, func(t *testing.T) {
			p := newPair(t, setup{})
			push, q := p.begin(t, 1, 1, 2)
			require.NoError(t, push.Layer(within(t), 0))
			<-q.Layers()
			require.NoError(t, p.prefill.peer.Notify(within(t), send(push.session)))
			<-q.Done()
			<-push.Ended()
			if !errors.Is(q.Err(), engine.ErrCorrupt) || !errors.Is(push.Err(), engine.ErrCorrupt) {
				t.Errorf("receiver: %v, sender: %v", q.Err(), push.Err())
			}
			q.Release()
		})
	}
}

// TestDoneWithoutLayersIsNoEnd: the last word alone completes nothing.
func TestDoneWithoutLayersIsNoEnd(t *testing.T) {
	testkit.InVirtualTime(t, doneWithoutLayersIsNoEnd)
}

func doneWithoutLayersIsNoEnd(t *testing.T) {
	p := newPair(t, setup{receiver: func(c *ReceiverConfig) {
		c.IdleTimeout = 50 * time.Millisecond
	}})
	push, q := p.beginSoon(t, 1, 2)
	require.NoError(t, p.prefill.peer.Notify(within(t), appendHeader(nil, toReceiver, kindDone, 0,
		push.session)))
	<-q.Done()
	if !errors.Is(q.Err(), engine.ErrTimeout) {
		t.Errorf("receiver: %v", q.Err())
	}
	<-push.Ended()
}

// TestDoneIsASignOfLifeOnce: said again and again it would hold the blocks for ever.
func TestDoneIsASignOfLifeOnce(t *testing.T) {
	p := newPair(t, setup{})
	q := newRequest(p.receiver, p.prefill.peer, 1)
	for _, want := range []int{1, 0, 0} {
		q.receive(&message{kind: kindDone})
		if n := len(q.alive); n != want {
			t.Errorf("%d signs of life, want %d", n, want)
		}
		for len(q.alive) > 0 {
			<-q.alive
		}
	}
}

func TestMuxDealsOut(t *testing.T) {
	p := newPair(t, setup{})
	got := make(chan string, 8)
	note := func(name string) func(engine.Notification) {
		return func(n engine.Notification) { got <- name + string(n.Data) }
	}
	require.NoError(t, p.decode.mux.Handle('a', note("a:")))
	if err := p.decode.mux.Handle('a', note("b:")); !errors.Is(err, engine.ErrBusy) {
		t.Errorf("a second handler: %v", err)
	}
	p.send(t, "x") // nobody wants it
	p.send(t, "a1")
	p.decode.mux.HandleRest(note("rest:"))
	p.send(t, "x2")
	p.decode.mux.Forget('a')
	p.send(t, "a3")
	for _, want := range []string{"a:a1", "rest:x2", "rest:a3"} {
		select {
		case s := <-got:
			if s != want {
				t.Errorf("got %q, want %q", s, want)
			}
		case <-time.After(limit):
			t.Fatalf("%q did not arrive", want)
		}
	}
	if n := p.decode.mux.Dropped(); n != 1 {
		t.Errorf("%d messages dropped, want 1", n)
	}
	p.handOver(t, 1, 1).Release() // goes on beside
}

// send sends a message and waits until the Mux has dealt with it.
func (p *pair) send(t *testing.T, msg string) {
	t.Helper()
	require.NoError(t, p.prefill.peer.Notify(within(t), []byte(msg)))
	p.handOver(t, 99).Release() // an empty request is behind it in the queue
}

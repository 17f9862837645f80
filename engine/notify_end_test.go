// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine/internal/exchange"
	"github.com/sluicehq/sluice/internal/testing/virtual"
)

// TestNotifyGivesUp has a peer without room. The error says why, and nothing of
// the attempt stays behind.
func TestNotifyGivesUp(t *testing.T) { virtual.Time(t, notifyGivesUp) }

func notifyGivesUp(t *testing.T) {
	f := &fake{manual: true}
	f.onCancel = func(tag uint64) { f.drop(tag, ErrAborted) }
	p, _, _ := overFake(t, f, limit)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if err := p.Notify(ctx, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want the context's error", err)
	}
	stuck := make(chan error)
	go func() { stuck <- p.Notify(context.Background(), nil) }()
	for len(f.seen()) < 2 {
		time.Sleep(time.Millisecond)
	}
	check(t, p.Close())
	if err := <-stuck; err == nil {
		t.Error("a message reached a peer that was closed")
	}
	if n := slotsInUse(p.e); n != 0 {
		t.Errorf("%d transfers are left of a closed peer", n)
	}
}

// TestNotifyWithoutProof must not go on with a transfer that was given up.
func TestNotifyWithoutProof(t *testing.T) { virtual.Time(t, notifyWithoutProof) }

func notifyWithoutProof(t *testing.T) {
	p, _, _ := overFake(t, &fake{manual: true, brokenClose: true}, 10*time.Millisecond)
	for range 2 * notifyTransfersMax {
		if err := p.Notify(within(t), nil); !errors.Is(err, ErrTimeout) &&
			!errors.Is(err, ErrPeerLost) && !errors.Is(err, ErrNoRoute) {
			t.Errorf("got %v", err)
		}
	}
	if n := slotsInUse(p.e); n > notifyTransfersMax {
		t.Errorf("%d transfers are in use", n)
	}
}

// TestReceiveLeavesNothingBehind has the end of a full channel meet a spinner: the
// messages that the spinner has no room for reach the channel all the same.
func TestReceiveLeavesNothingBehind(t *testing.T) { virtual.Time(t, receiveLeavesNothingBehind) }

func receiveLeavesNothingBehind(t *testing.T) {
	received, spinning, goOn := 0, make(chan struct{}), make(chan struct{})
	var held bool
	f := &fake{}
	f.onReceive = func(msgs []driver.Message) int { // called under receiveMu
		switch {
		case !held && len(msgs) == 1: // the spinner
			held = true
			close(spinning)
			<-goOn
			msgs[0] = driver.Message{Conn: 1, Data: []byte{exchange.IsNotification, 0}}
			received = 1
			return 1
		case held && received == 1:
			msgs[0] = driver.Message{Conn: 1, Data: []byte{exchange.IsNotification, 1}}
			received = 2
			return 1
		}
		return 0
	}
	e := open(t, "e", func(c *Config) { c.Backends = []driver.Backend{f} })
	l := e.lanes[0]
	l.receiveMu.Lock()
	l.greet(1, e.hello(exchange.Secret{}))
	l.receiveMu.Unlock()
	first := make(chan int)
	go func() {
		var one [1]Notification
		n := 0
		for n == 0 { // the progress goroutine may be looking just now
			n = e.Receive(one[:])
		}
		first <- n
	}()
	<-spinning
	e.lanes[0].receive() // the wake-up for the second message comes to nothing
	time.Sleep(3 * napTime)
	close(goOn)
	if n := <-first; n != 1 {
		t.Errorf("the spinner got %d messages", n)
	}
	if n := next(t, e); n.Data[0] != 1 {
		t.Errorf("got %+v", n)
	}
}

func slotsInUse(e *Engine) int {
	e.slots.mu.Lock()
	defer e.slots.mu.Unlock()
	return e.slots.used - len(e.slots.free)
}

// TestNotifyOverALostConnection attaches a message before the connection is lost, and posts
// then: the error says so.
func TestNotifyOverALostConnection(t *testing.T) {
	p, src, m, _ := pair(t, 4096)
	tr := transfer(t, p, Read)
	check(t, tr.Add(src, 0, m, 0, 64))
	check(t, tr.Notify([]byte("read")))
	p.conns[0].lose()
	require.ErrorIs(t, tr.Post(), ErrPeerLost)
}

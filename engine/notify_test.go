// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/virtual"
	"github.com/stretchr/testify/require"
)

// next waits for a notification.
func next(t testing.TB, e *Engine) Notification {
	t.Helper()
	select {
	case n := <-e.Notifications():
		return n
	case <-time.After(limit):
		t.Fatal("no notification came")
		return Notification{}
	}
}

func TestNotificationFollowsItsData(t *testing.T) {
	a, b := open(t, "a"), open(t, "b")
	src, dst := register(t, a, "src", 1<<20), register(t, b, "dst", 1<<20)
	p, back := connect(t, a, b), connect(t, b, a)
	tr := transfer(t, p, Write)
	check(t, tr.Add(src, 0, remote(t, p, "dst"), 0, 1<<20))
	message := make([]byte, 4)
	check(t, tr.Notify(message))
	for i := range 50 {
		binary.LittleEndian.PutUint32(message, uint32(i))
		fill(src.Bytes(), byte(i))
		check(t, tr.Post())
		n := next(t, b)
		if n.Peer != back || n.Backend != "mem" || binary.LittleEndian.Uint32(n.Data) != uint32(i) {
			t.Fatalf("round %d: %+v", i, n)
		}
		if !bytes.Equal(dst.Bytes(), src.Bytes()) {
			t.Fatalf("round %d: the message came before its data", i)
		}
		check(t, tr.Wait(within(t)))
	}
}

func TestNotifyAlone(t *testing.T) {
	a, b := open(t, "a"), open(t, "b")
	p := connect(t, a, b)
	long := make([]byte, 16<<20)
	fill(long, 9)
	for _, msg := range [][]byte{[]byte("hello"), {}, bytes.Repeat([]byte("x"), 64<<10), long} {
		check(t, p.Notify(within(t), msg))
		if n := next(t, b); n.Peer != nil || !bytes.Equal(n.Data, msg) {
			t.Errorf("%d bytes arrived of %d, from %v", len(n.Data), len(msg), n.Peer)
		}
	}
	if err := p.Notify(within(t), make([]byte, 16<<20+1)); !errors.Is(err, ErrBounds) {
		t.Errorf("a message too long: %v", err)
	}
	check(t, p.Close())
	if err := p.Notify(within(t), []byte("late")); !errors.Is(err, ErrPeerLost) {
		t.Errorf("notify after close: %v", err)
	}
	if n := next(t, b); !errors.Is(n.Err, ErrPeerLost) {
		t.Errorf("the last word of a peer: %+v", n)
	}
}

// TestNobodyReads fills the channel and the backend behind it: senders wait,
// nothing is lost, and all flows when somebody reads.
// TestNotifyWithoutWaiting: a context that is over keeps no message from a peer that has room.
func TestNotifyWithoutWaiting(t *testing.T) {
	a, b := open(t, "a"), open(t, "b")
	p := connect(t, a, b)
	over, cancel := context.WithCancel(context.Background())
	cancel()
	for i := range 500 {
		require.NoError(t, p.Notify(over, []byte{byte(i)}), i)
		require.Equal(t, byte(i), next(t, b).Data[0])
	}
	for range cap(p.notifiers) {
		<-p.notifiers
	}
	require.ErrorIs(t, p.Notify(over, nil), context.Canceled) // all are in use
}

func TestNobodyReads(t *testing.T) { virtual.Time(t, nobodyReads) }

func nobodyReads(t *testing.T) {
	small, err := mem.New(mem.Config{BatchesMax: 8})
	check(t, err)
	a := open(t, "a")
	b := open(t, "b", func(c *Config) {
		c.NotificationsMax = 4
		c.Backends = []driver.Backend{small}
	})
	p := connect(t, a, b)
	const total = 100
	transfers := make([]*Transfer, total)
	for i := range transfers {
		transfers[i] = transfer(t, p, Write)
		check(t, transfers[i].Notify(binary.LittleEndian.AppendUint32(nil, uint32(i))))
		check(t, transfers[i].Post())
	}
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if err := transfers[total-1].Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("the last of %d messages went out though nobody reads: %v", total, err)
	}
	for i := range total {
		if n := next(t, b); binary.LittleEndian.Uint32(n.Data) != uint32(i) {
			t.Fatalf("message %d: got %x", i, n.Data)
		}
	}
	for _, tr := range transfers {
		check(t, tr.Wait(within(t)))
	}
}

func TestReceiveSpinning(t *testing.T) {
	a, b := open(t, "a"), open(t, "b")
	p := connect(t, a, b)
	go func() {
		for i := range 300 {
			_ = p.Notify(context.Background(), binary.LittleEndian.AppendUint32(nil, uint32(i)))
		}
	}()
	var notes [3]Notification
	want := uint32(0)
	for end := time.Now().Add(limit); want < 300; {
		if time.Now().After(end) {
			t.Fatalf("%d of 300 messages came", want)
		}
		for _, n := range notes[:b.Receive(notes[:])] {
			if got := binary.LittleEndian.Uint32(n.Data); got != want {
				t.Fatalf("message %d came where %d was due", got, want)
			}
			want++
		}
	}
}

func TestReadThenNotify(t *testing.T) {
	a, b := open(t, "a"), open(t, "b")
	here, there := register(t, a, "here", 4096), register(t, b, "there", 4096)
	fill(there.Bytes(), 9)
	p := connect(t, a, b)
	tr := transfer(t, p, Read)
	check(t, tr.Add(here, 0, remote(t, p, "there"), 0, 4096))
	check(t, tr.Notify([]byte("done reading")))
	check(t, tr.Post())
	next(t, b)
	if !bytes.Equal(here.Bytes(), there.Bytes()) {
		t.Error("the peer was told before the bytes were here")
	}
	check(t, tr.Wait(within(t)))
}

// TestTwoConnectionsOfOneSender has a peer that connects twice and closes one of
// its connections: neither side is lost, and messages keep their sender.
func TestTwoConnectionsOfOneSender(t *testing.T) {
	a, b := open(t, "a"), open(t, "b")
	first, second := connect(t, a, b), connect(t, a, b)
	older, newer := connect(t, b, a), connect(t, b, a)
	check(t, first.Close())
	if n := next(t, b); !errors.Is(n.Err, ErrPeerLost) {
		t.Errorf("the last word of a connection: %+v", n)
	}
	for _, p := range []*Peer{older, newer} {
		select {
		case <-p.Lost():
			t.Error("a live peer is lost because the other side closed one of two connections")
		default:
		}
	}
	check(t, newer.Close())
	check(t, second.Notify(within(t), []byte("still here")))
	for {
		n := next(t, b)
		if n.Err != nil {
			continue
		}
		if n.Peer != older {
			t.Errorf("a message of %v, want the peer that is left", n.Peer)
		}
		return
	}
}

// TestNext: a goroutine that waits for messages one by one gets them in order, at once or asleep;
// one that is there comes before the end of the context, and the engine's Close ends the wait.
func TestNext(t *testing.T) { virtual.Time(t, takeNext) }

func takeNext(t *testing.T) {
	a, b := open(t, "a"), open(t, "b")
	p := connect(t, a, b)
	over, cancel := context.WithCancel(context.Background())
	cancel()
	_, err := b.Next(over)
	require.ErrorIs(t, err, context.Canceled)
	const total = 300
	sent := make(chan error, 1)
	go func() {
		for i := range uint32(total) {
			if i%50 == 49 {
				time.Sleep(5 * time.Millisecond) // the receiver has gone to sleep
			}
			if err := p.Notify(context.Background(), binary.LittleEndian.AppendUint32(nil,
				i)); err != nil {
				sent <- err
				return
			}
		}
		sent <- nil
	}()
	for i := range uint32(total) {
		n, err := b.Next(within(t))
		require.NoError(t, err)
		require.Equal(t, i, binary.LittleEndian.Uint32(n.Data))
	}
	require.NoError(t, <-sent)
	require.NoError(t, p.Notify(within(t), []byte("last")))
	require.Eventually(t, func() bool {
		n, err := b.Next(over)
		return err == nil && string(n.Data) == "last"
	}, limit, time.Millisecond)
	ended := make(chan error, 1)
	go func() {
		for {
			if n, err := b.Next(context.Background()); n.Err == nil { // no last word of a peer
				ended <- err
				return
			}
		}
	}()
	require.NoError(t, b.Close())
	require.ErrorIs(t, <-ended, ErrClosed)
}

// drowsy is a backend whose Arm does not return while it is told so.
type drowsy struct {
	driver.Backend
	hold  atomic.Bool
	armed chan struct{} // Arm has begun
	goOn  chan struct{}
}

func (s *drowsy) Arm() (bool, error) {
	if s.hold.CompareAndSwap(true, false) {
		close(s.armed)
		<-s.goOn
	}
	return s.Backend.Arm()
}

// TestNextTakesFromTheBackend, also where the progress goroutine does nothing: a program that looks
// for messages again and again must not wait for another goroutine's wake-up.
func TestNextTakesFromTheBackend(t *testing.T) {
	inner, err := mem.New(mem.Config{})
	require.NoError(t, err)
	s := &drowsy{Backend: inner, armed: make(chan struct{}), goOn: make(chan struct{})}
	defer close(s.goOn)
	a, b := open(t, "a"), open(t, "b", func(c *Config) { c.Backends = []driver.Backend{s} })
	p := connect(t, a, b)
	require.NoError(t, p.Notify(within(t), []byte("first")))
	n, err := b.Next(within(t))
	require.NoError(t, err)
	require.Equal(t, "first", string(n.Data))
	s.hold.Store(true)
	b.lanes[0].stir()
	<-s.armed
	require.NoError(t, p.Notify(within(t), []byte("second")))
	over, cancel := context.WithCancel(context.Background())
	cancel()
	n, err = b.Next(over)
	require.NoError(t, err, "the message is with the backend")
	require.Equal(t, "second", string(n.Data))
	require.NoError(t, p.Notify(within(t), []byte("third")))
	n, err = b.Next(within(t))
	require.NoError(t, err)
	require.Equal(t, "third", string(n.Data))
}

// TestPace: a long wait ends the looking for messages, and some short ones bring it back.
func TestPace(t *testing.T) {
	var p pace
	p.tell(time.Hour)
	require.Greater(t, p.wait(), 200*time.Microsecond)
	for range 4 {
		p.tell(time.Hour)
	}
	short := 0
	for ; p.wait() > 100*time.Microsecond; short++ {
		p.tell(20 * time.Microsecond)
	}
	require.LessOrEqual(t, short, 10)
}

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

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/internal/wire"
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

func TestNotifyAlone(t *testing.T) {
	a, b := open(t, "a"), open(t, "b")
	p := connect(t, a, b)
	long := make([]byte, 16<<20)
	fill(long, 9)
	for _, msg := range [][]byte{[]byte("hello"), {}, bytes.Repeat([]byte("x"), 64<<10), long} {
		check(t, p.Notify(within(t), msg))
		if n := next(t, b); n.Peer != nil || n.Backend != "mem" || !bytes.Equal(n.Data, msg) {
			t.Errorf("%d bytes arrived of %d, from %v by %s", len(n.Data), len(msg), n.Peer,
				n.Backend)
		}
	}
	require.ErrorIs(t, p.Notify(within(t), make([]byte, 16<<20+1)), ErrBounds, "a message too long")
	check(t, p.Close())
	require.ErrorIs(t, p.Notify(within(t), []byte("late")), ErrPeerLost, "notify after close")
	if n := next(t, b); !errors.Is(n.Err, ErrPeerLost) {
		t.Errorf("the last word of a peer: %+v", n)
	}
}

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
}

// TestNobodyReads fills the channel and the backend behind it: senders wait,
// nothing is lost, and all flows when the program reads.
func TestNobodyReads(t *testing.T) { testkit.InVirtualTime(t, nobodyReads) }

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
	require.ErrorIs(t, transfers[total-1].Wait(ctx), context.DeadlineExceeded,
		"the last of %d messages went out though nobody reads", total)
	for i := range total {
		if n := next(t, b); binary.LittleEndian.Uint32(n.Data) != uint32(i) {
			t.Fatalf("message %d: got %x", i, n.Data)
		}
	}
	for _, tr := range transfers {
		check(t, tr.Wait(within(t)))
	}
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
		require.Same(t, older, n.Peer, "want the peer that is left")
		return
	}
}

// TestNext: a goroutine that waits for messages one by one gets them in order, at once or asleep;
// one that is there comes before the end of the context, and the engine's Close ends the wait.
func TestNext(t *testing.T) { testkit.InVirtualTime(t, takeNext) }

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

// TestNextTakesFromTheBackend, also where the progress goroutine does nothing: a program that looks
// for messages again and again must not wait for another goroutine's wake-up.
func TestNextTakesFromTheBackend(t *testing.T) {
	var hold atomic.Bool
	armed, goOn := make(chan struct{}), make(chan struct{})
	defer close(goOn)
	a, b := open(t, "a"), open(t, "b", over(rigged(t, mem.Config{}, rig{onArm: func() {
		if hold.CompareAndSwap(true, false) {
			close(armed)
			<-goOn
		}
	}})))
	p := connect(t, a, b)
	require.NoError(t, p.Notify(within(t), []byte("first")))
	n, err := b.Next(within(t))
	require.NoError(t, err)
	require.Equal(t, "first", string(n.Data))
	hold.Store(true)
	b.lanes[0].wakeProgress()
	<-armed
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
	p.add(time.Hour)
	require.Greater(t, p.wait(), 200*time.Microsecond)
	for range 4 {
		p.add(time.Hour)
	}
	short := 0
	for ; p.wait() > 100*time.Microsecond; short++ {
		p.add(20 * time.Microsecond)
	}
	require.LessOrEqual(t, short, 10)
}

// TestNotifyGivesUp has a peer without room. The error says why, and nothing of
// the attempt stays behind.
func TestNotifyGivesUp(t *testing.T) { testkit.InVirtualTime(t, notifyGivesUp) }

func notifyGivesUp(t *testing.T) {
	f := &fake{manual: true}
	f.onCancel = func(tag uint64) { f.drop(tag, ErrAborted) }
	p, _, _ := overFake(t, f, limit)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, p.Notify(ctx, nil), context.DeadlineExceeded)
	stuck := make(chan error)
	go func() { stuck <- p.Notify(context.Background(), nil) }()
	for len(f.seen()) < 2 {
		time.Sleep(time.Millisecond)
	}
	check(t, p.Close())
	require.Error(t, <-stuck, "a message reached a peer that was closed")
	require.Zero(t, slotsInUse(p.e), "transfers are left of a closed peer")
}

func soonOver(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}

// A message that a backend has taken is the backend's where its acknowledgement takes a round
// trip: Notify goes on. Its transfer is given back with its end, whichever that is.
func TestNotifyDoesNotAwaitAnAcknowledgement(t *testing.T) {
	testkit.InVirtualTime(t, leaveMessages)
}

func leaveMessages(t *testing.T) {
	f := &fake{manual: true, sleep: true, room: 2}
	f.onCancel = func(tag uint64) { f.drop(tag, ErrAborted) }
	p, _, _ := overFake(t, f, limit)
	before := slotsInUse(p.e)
	check(t, p.Notify(within(t), []byte("first")))
	check(t, p.Notify(within(t), []byte("second")))
	require.Equal(t, before+2, slotsInUse(p.e))
	require.ErrorIs(t, p.Notify(soonOver(t), nil), context.DeadlineExceeded, "one without room")
	require.Equal(t, before+2, slotsInUse(p.e))
	require.True(t, f.finishOne(nil))
	require.True(t, f.finishOne(ErrPeerLost))
	until(t, "both are given back", func() bool { return slotsInUse(p.e) == before })
	over, end := context.WithCancel(t.Context())
	end()
	_ = p.Notify(over, []byte("fourth")) // it is taken back, or was acknowledged
	require.Equal(t, before, slotsInUse(p.e), "one that does not wait for room uses it up")
	p.e.left.Store(int64(p.e.cfg.TransfersMax / 4))
	require.ErrorIs(t, p.Notify(soonOver(t), nil), context.DeadlineExceeded)
	p.e.left.Store(0)
	require.Equal(t, before, slotsInUse(p.e), "more are left than may be")
	check(t, p.Notify(within(t), []byte("last")))
	check(t, p.Close())
	require.Equal(t, before, slotsInUse(p.e), "transfers are left of a closed peer")
	require.Zero(t, p.e.left.Load())
}

// Where another connection of the peer takes the message, Notify awaits its end as ever: that may
// drop what it has not sent when it is closed.
func TestNotifyAwaitsABackendThatDoesNotSleep(t *testing.T) {
	near := &fake{name: "near", manual: true}
	near.onCancel = func(tag uint64) { near.drop(tag, ErrAborted) }
	e := open(t, "e", func(c *Config) {
		c.Backends = []driver.Backend{near, &fake{name: "far", manual: true, sleep: true}}
	})
	p, err := e.Self()
	check(t, err)
	require.ErrorIs(t, p.Notify(soonOver(t), nil), context.DeadlineExceeded)
	require.Zero(t, e.left.Load())
}

// TestNotifyWithoutProof keeps the slot of the one message that was given up until its batch has
// ended after all, and no other.
func TestNotifyWithoutProof(t *testing.T) { testkit.InVirtualTime(t, notifyWithoutProof) }

func notifyWithoutProof(t *testing.T) {
	f := &fake{manual: true, brokenClose: true}
	p, _, _ := overFake(t, f, 10*time.Millisecond)
	for range 8 {
		if err := p.Notify(within(t), nil); !errors.Is(err, ErrTimeout) &&
			!errors.Is(err, ErrPeerLost) && !errors.Is(err, ErrNoRoute) {
			t.Errorf("got %v", err)
		}
	}
	require.Equal(t, 1, slotsInUse(p.e))
	require.ErrorIs(t, p.e.slots.proof(), ErrUnproven)
	f.finishOne(nil)
	until(t, "the batch has ended", func() bool { return slotsInUse(p.e) == 0 })
	require.NoError(t, p.e.slots.proof())
}

// TestReceiveLeavesNothingBehind has the end of a full channel meet a spinner: the
// messages that the spinner has no room for reach the channel all the same.
func TestReceiveLeavesNothingBehind(t *testing.T) {
	testkit.InVirtualTime(t, receiveLeavesNothingBehind)
}

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
			msgs[0] = driver.Message{Conn: 1, Data: []byte{wire.KindNotification, 0}}
			received = 1
			return 1
		case held && received == 1:
			msgs[0] = driver.Message{Conn: 1, Data: []byte{wire.KindNotification, 1}}
			received = 2
			return 1
		}
		return 0
	}
	e := open(t, "e", func(c *Config) { c.Backends = []driver.Backend{f} })
	l := e.lanes[0]
	l.receiveMu.Lock()
	l.addSender(1, e.hello(wire.Secret{}))
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
	require.EqualValues(t, 1, <-first, "the spinner got messages")
	if n := next(t, e); n.Data[0] != 1 {
		t.Errorf("got %+v", n)
	}
}

func slotsInUse(e *Engine) int {
	e.slots.mu.Lock()
	defer e.slots.mu.Unlock()
	return e.slots.used - len(e.slots.unused)
}

// TestNotifyOverALostConnection attaches a message before the connection is lost, and posts
// then: the error says so.
func TestNotifyOverALostConnection(t *testing.T) {
	p, src, m, _ := pair(t, 4096)
	tr := transfer(t, p, Read)
	check(t, tr.Add(src, 0, m, 0, 64))
	check(t, tr.Notify([]byte("read")))
	p.conns[0].markLost()
	require.ErrorIs(t, tr.Post(), ErrPeerLost)
}

// TestInboxHoldsItsBytes: of large notifications, that the program does not read, the channel takes
// what the budget allows, and their senders wait. All arrive, in order, once it reads.
func TestInboxHoldsItsBytes(t *testing.T) { testkit.InVirtualTime(t, inboxHoldsItsBytes) }

func inboxHoldsItsBytes(t *testing.T) {
	const size, budget = 256 << 10, 1 << 20
	a := open(t, "a")
	b := open(t, "b", func(c *Config) { c.NotificationBytes = budget })
	p := connect(t, a, b)
	var list []*Transfer
	for i := range 20 {
		tr := transfer(t, p, Write)
		check(t, tr.Notify(bytes.Repeat([]byte{byte(i)}, size)))
		check(t, tr.Post())
		list = append(list, tr)
	}
	until(t, "the budget is used", func() bool { return len(b.inbox) == budget/size })
	time.Sleep(5 * inboxPause) // no more comes
	require.Len(t, b.inbox, budget/size)
	for i := range 20 {
		n := next(t, b)
		require.Equal(t, byte(i), n.Data[0])
		require.LessOrEqual(t, len(b.inbox), budget/size)
	}
	for _, tr := range list {
		require.NoError(t, tr.Wait(within(t)))
	}
}

// TestInboxTakesOneOverItsBytes, and closes with one that waits.
func TestInboxTakesOneOverItsBytes(t *testing.T) {
	testkit.InVirtualTime(t, inboxTakesOneOverItsBytes)
}

func inboxTakesOneOverItsBytes(t *testing.T) {
	a := open(t, "a")
	b := open(t, "b", func(c *Config) { c.NotificationBytes = 1 })
	p := connect(t, a, b)
	check(t, p.Notify(within(t), []byte("first")))
	require.Equal(t, "first", string(next(t, b).Data))
	soon, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	for range 3 {
		_ = p.Notify(soon, []byte("more"))
	}
	check(t, b.Close())
}

// part is one of a long notification.
func part(flags byte, n int) []byte { return append([]byte{flags}, make([]byte, n)...) }

// TestPartsOfAll: what has begun and not ended takes a sum of all connections, of which the origin
// that holds most gives up what has waited longest. One alone always has room.
func TestPartsOfAll(t *testing.T) {
	const most, limit = 100 << 10, 300 << 10
	j := reassembly{most: most}
	from := func(origin string) *sender { return &sender{ticket: &ticket{origin: origin}} }
	adds := func(s *sender, flags byte, n int) []byte {
		t.Helper()
		whole, ok, err := j.add(s, part(flags, n), limit)
		require.NoError(t, err)
		require.Equal(t, flags&wire.LastPart != 0, ok)
		require.True(t, j.bytes <= most || j.holders() == 1)
		return whole
	}
	alone := from("a")
	adds(alone, wire.FirstPart, 10<<10)
	for range 20 {
		adds(alone, 0, 10<<10)
	}
	require.Len(t, adds(alone, wire.LastPart, 10<<10), 220<<10)
	require.Zero(t, j.bytes)

	honest := from("b")
	adds(honest, wire.FirstPart, 20<<10)
	var crowd []*sender
	for range 24 {
		s := from("a")
		crowd = append(crowd, s)
		adds(s, wire.FirstPart, 10<<10)
	}
	for range 2 {
		adds(honest, 0, 10<<10)
	}
	require.Len(t, adds(honest, wire.LastPart, 5), 40<<10+5)
	_, _, err := j.add(crowd[0], part(0, 1), limit)
	require.ErrorIs(t, err, ErrFull)
	require.ErrorIs(t, err, ErrPeerLost)
	require.ErrorContains(t, err, "NotificationBytes")
	adds(crowd[23], wire.LastPart, 1)
	for _, s := range crowd {
		j.forget(s)
	}
	require.Zero(t, j.bytes)
	require.Empty(t, j.of)
}

// TestPartsThatNeverEnd: connections that begin long notifications and end none keep no more than
// the bound, another one's comes, and those that lost one are lost, which the program is told.
func TestPartsThatNeverEnd(t *testing.T) {
	const room, conns = 1 << 20, 24
	e := open(t, "e", shortWords(t), func(c *Config) {
		c.NotificationBytes, c.NotifyMax = room, room
	})
	raw := newMem(t)
	defer raw.Close()
	var peers []driver.Peer
	say := func(p driver.Peer, msg []byte) {
		batch, done := driver.Batch{Op: Write, Tail: driver.NotifyTail, Notify: msg},
			[1]driver.Completion{}
		for err := error(ErrFull); errors.Is(err, ErrFull); {
			_, _ = raw.Poll(done[:])
			err = p.Submit(1, &batch)
			require.True(t, err == nil || errors.Is(err, ErrFull), "%v", err)
		}
	}
	for i := range conns {
		p, err := raw.Connect(within(t), e.lanes[0].b.Addr())
		require.NoError(t, err)
		peers = append(peers, p)
		h := wire.Hello{ID: wire.ID{byte(i + 1)}, Name: "x"}
		say(p, h.Append(nil))
		for n := 0; n < room/2; n += 1 << 10 {
			flags := byte(0)
			if n == 0 {
				flags = wire.FirstPart
			}
			say(p, append([]byte{wire.KindPart}, part(flags, 1<<10)...))
		}
	}
	until(t, "all have come", func() bool {
		e.reassembly.mu.Lock()
		defer e.reassembly.mu.Unlock()
		return len(e.reassembly.of) == conns
	})
	e.reassembly.mu.Lock()
	require.LessOrEqual(t, e.reassembly.bytes, room)
	e.reassembly.mu.Unlock()

	a := open(t, "a", shortWords(t), func(c *Config) { c.NotifyMax = room })
	p, err := a.Dial(within(t), "unix", serveUnix(t, e))
	require.NoError(t, err)
	text := bytes.Repeat([]byte{7}, room/2)
	require.NoError(t, p.Notify(within(t), text))
	require.Equal(t, text, next(t, e).Data)
	say(peers[0], append([]byte{wire.KindPart}, part(0, 1)...))
	require.ErrorIs(t, next(t, e).Err, ErrFull)
}

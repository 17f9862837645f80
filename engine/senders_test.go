// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"context"
	"errors"
	"net"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/internal/wire"
)

// serveUnix serves an engine at a socket and returns its path.
func serveUnix(t testing.TB, e *Engine) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = e.Serve(ctx, l) }()
	t.Cleanup(func() { cancel(); <-ended })
	return path
}

// TestLastWordOfOneDial closes the first of two Peers of one engine: the serving side loses that
// one alone.
func TestLastWordOfOneDial(t *testing.T) {
	came := make(chan *Peer, 2)
	b := open(t, "b", func(c *Config) { c.OnPeer = func(p *Peer) { came <- p } })
	a := open(t, "a")
	path := serveUnix(t, b)
	first, err := a.Dial(within(t), "unix", path)
	require.NoError(t, err)
	one := <-came
	second, err := a.Dial(within(t), "unix", path)
	require.NoError(t, err)
	two := <-came
	for p, q := range map[*Peer]*Peer{first: one, second: two} {
		require.NoError(t, p.Notify(within(t), []byte("hello")))
		n := next(t, b)
		require.Same(t, q, n.Peer)
		require.Equal(t, "a", n.From)
	}
	require.NoError(t, first.Close())
	n := next(t, b)
	require.ErrorIs(t, n.Err, ErrPeerLost)
	require.Same(t, one, n.Peer)
	<-one.Lost()
	require.False(t, two.isLost() || second.isLost())
	require.NoError(t, second.Notify(within(t), nil))
	require.Same(t, two, next(t, b).Peer)
}

// TestNoMemberSpeaksAsAnother has a connection claim to be an engine that the owner knows by
// Serve, with and without a ticket of its own.
func TestNoMemberSpeaksAsAnother(t *testing.T) {
	b, a := open(t, "b"), open(t, "a")
	p, err := a.Dial(within(t), "unix", serveUnix(t, b))
	require.NoError(t, err)
	require.NoError(t, p.Notify(within(t), []byte("true")))
	known := next(t, b)
	require.NotNil(t, known.Peer)
	own := b.issueTicket("host a") // given to the liar, who is a member, too
	for name, show := range map[string]wire.Secret{"none": {}, "guessed": {1},
		"its own": own.secret} {
		t.Run(name, func(t *testing.T) {
			liar := dialRaw(t, b, a, show)
			liar.say(t, append([]byte{wire.KindNotification}, "lie"...))
			n := next(t, b)
			require.Equal(t, "lie", string(n.Data))
			require.Nil(t, n.Peer)
			require.Empty(t, n.From)
			require.NoError(t, liar.p.Close())
			require.Nil(t, next(t, b).Peer)
			require.False(t, known.Peer.isLost(), "the liar has hung up in the name of another")
		})
	}
	require.NoError(t, p.Notify(within(t), []byte("true")))
	require.Same(t, known.Peer, next(t, b).Peer)
}

// TestSenderByConnect knows senders by what they claim, and takes the last live Peer of theirs.
func TestSenderByConnect(t *testing.T) {
	a, b := open(t, "a"), open(t, "b")
	p := connect(t, a, b)
	says := func() *Peer {
		require.NoError(t, p.Notify(within(t), nil))
		n := next(t, b)
		require.Equal(t, "a", n.From)
		return n.Peer
	}
	require.Nil(t, says())
	first := connect(t, b, a)
	require.Same(t, first, says())
	second := connect(t, b, a)
	require.Same(t, second, says())
	require.NoError(t, second.Close())
	require.Same(t, first, says())
	require.NoError(t, first.Close())
	require.Nil(t, says())
}

// TestOwnDescriptionIsServedNoPeer sends an engine its own description.
func TestOwnDescriptionIsServedNoPeer(t *testing.T) {
	came := make(chan *Peer, 64)
	e := open(t, "e", func(c *Config) { c.OnPeer = func(p *Peer) { came <- p } })
	path := serveUnix(t, e)
	self, err := e.Dial(within(t), "unix", path)
	require.NoError(t, err)
	require.True(t, self.isSelf())
	ours, err := e.Describe()
	require.NoError(t, err)
	before := runtime.NumGoroutine()
	for range 100 {
		c, err := net.Dial("unix", path)
		require.NoError(t, err)
		require.NoError(t, session.WriteFrame(c, session.DescriptionFrame,
			append(bytes.Clone(ours), make([]byte, 16)...)))
		_, err = session.ReadFrame(c, 1<<24)
		require.NoError(t, err)
		_, err = session.ReadFrame(c, 0)
		require.NoError(t, err)
		require.NoError(t, c.Close())
	}
	until(t, "its goroutines end", func() bool { return runtime.NumGoroutine() <= before+5 })
	require.Empty(t, came)
	e.mu.Lock()
	defer e.mu.Unlock()
	require.Len(t, e.tickets, 1, "tickets other than that of Self")
}

// TestLongNotifications go in parts, from several transfers at once, and one that is given up
// in the middle leaves nothing behind.
func TestLongNotifications(t *testing.T) {
	a := open(t, "a", shortWords(t))
	b := open(t, "b", shortWords(t), func(c *Config) { c.NotifyMax = 1 << 20 })
	p := connect(t, a, b)
	require.Equal(t, 1<<20, p.MessageMax())
	tooLong := transfer(t, p, Write)
	check(t, tooLong.Notify(make([]byte, 1<<20+1)))
	require.ErrorIs(t, tooLong.Post(), ErrBounds)
	const count, size = 8, 100_000
	var list []*Transfer
	for i := range count {
		tr := transfer(t, p, Write)
		check(t, tr.Notify(bytes.Repeat([]byte{byte(i)}, size+i)))
		list = append(list, tr)
	}
	for range 3 {
		for _, tr := range list {
			check(t, tr.Post())
		}
		check(t, p.Notify(within(t), []byte("short")))
		seen, short := map[byte]bool{}, false
		for len(seen) < count || !short {
			n := next(t, b)
			if string(n.Data) == "short" {
				short = true
				continue
			}
			i := n.Data[0]
			require.False(t, seen[i])
			require.True(t, bytes.Equal(n.Data, bytes.Repeat([]byte{i}, size+int(i))))
			seen[i] = true
		}
		for _, tr := range list {
			require.NoError(t, tr.Wait(within(t)))
		}
	}
	require.Empty(t, b.inbox)
	for i := range 50 { // some of them end in the middle
		check(t, list[i%count].Post())
		_ = list[i%count].Abort(within(t))
		if err := list[i%count].Err(); err == nil {
			require.Len(t, next(t, b).Data, size+i%count)
		} else {
			require.True(t, errors.Is(err, ErrAborted), "%v", err)
		}
	}
	check(t, list[3].Post())
	require.NoError(t, list[3].Wait(within(t)))
	require.True(t, bytes.Equal(next(t, b).Data, bytes.Repeat([]byte{3}, size+3)))
}

// shortWords has an engine use mem with short messages.
func shortWords(t testing.TB) func(*Config) {
	return over(rigged(t, mem.Config{}, rig{caps: func(c *driver.Caps) {
		c.MessageMax = messageMin
	}}))
}

// TestAnswersWaitForRoom keeps what has no room and sends it in order when there is.
func TestAnswersWaitForRoom(t *testing.T) {
	var room atomic.Bool
	asked := make(chan struct{}, 1)
	a, b := newHost(t, "a"), newHostOver(t, rigged(t, mem.Config{}, rig{
		onAnswer: func([]byte) error {
			if room.Load() {
				return nil
			}
			select {
			case asked <- struct{}{}:
			default:
			}
			return driver.ErrFull
		}}), "b")
	fill(a.mem, 7)
	p := connect(t, a.e, b.e)
	tr := transfer(t, p, Write)
	room.Store(true) // for the window
	check(t, tr.Add(a.hbm, 0, remote(t, p, "hbm"), 0, hostBytes))
	room.Store(false)
	check(t, tr.Post())
	<-asked
	require.False(t, tr.Done())
	room.Store(true)
	b.e.lanes[0].wakeProgress() // as the backend does by its FD
	require.NoError(t, tr.Wait(within(t)))
	require.True(t, bytes.Equal(a.mem, b.mem))
}

// TestHostileMessages sends messages of all kinds that make no sense: none but a notification
// reaches the program.
func TestHostileMessages(t *testing.T) {
	l := open(t, "owner").lanes[0]
	for kind := range 256 {
		for n := range 40 {
			data := append([]byte{byte(kind)}, make([]byte, n)...)
			l.receiveMu.Lock()
			l.senders = map[uint64]*sender{1: {lane: l, conn: 1, gone: make(chan struct{})}}
			_, forProgram := l.dispatch(&driver.Message{Conn: 1, Data: data})
			l.receiveMu.Unlock()
			require.Equal(t, kind == wire.KindNotification, forProgram, "%x", data)
		}
	}
}

// TestConnectToAnEngineThatIsNotRead connects while the other program reads no notifications and
// all room is taken: bytes move, and what is sent later comes with its sender's name.
func TestConnectToAnEngineThatIsNotRead(t *testing.T) {
	testkit.InVirtualTime(t, connectToAnEngineThatIsNotRead)
}

func connectToAnEngineThatIsNotRead(t *testing.T) {
	b := open(t, "b", func(c *Config) { c.NotificationsMax = 1 })
	dst := register(t, b, "dst", 4096)
	a := open(t, "a")
	p := connect(t, a, b)
	var list []*Transfer
	for full := 0; full < 3; { // until the channel and the backend are full
		tr := transfer(t, p, Write)
		check(t, tr.Notify(make([]byte, 60<<10)))
		check(t, tr.Post())
		soon, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		if tr.Wait(soon) != nil {
			full++
		}
		cancel()
		list = append(list, tr)
	}
	c := open(t, "c", func(c *Config) { c.AbortGrace = 50 * time.Millisecond })
	src := register(t, c, "src", 4096)
	fill(src.Bytes(), 3)
	q, err := c.Connect(within(t), mustDescribe(t, b))
	require.NoError(t, err)
	tr := transfer(t, q, Write)
	check(t, tr.Add(src, 0, remote(t, q, "dst"), 0, 4096))
	run(t, tr)
	require.True(t, bytes.Equal(src.Bytes(), dst.Bytes()))
	check(t, tr.Notify([]byte("from c")))
	check(t, tr.Post())
	for n := next(t, b); n.From != "c"; n = next(t, b) {
		require.Equal(t, "a", n.From)
	}
	require.NoError(t, tr.Wait(within(t)))
	for _, tr := range list {
		_ = tr.Abort(within(t))
	}
}

func mustDescribe(t testing.TB, e *Engine) []byte {
	t.Helper()
	d, err := e.Describe()
	require.NoError(t, err)
	return d
}

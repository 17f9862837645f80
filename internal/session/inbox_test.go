// SPDX-License-Identifier: Apache-2.0

package session

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// wired is a sender between two inboxes, and how often each has been woken.
type wiredInboxes struct {
	Sender
	nearWoken, farWoken atomic.Int64
}

func newWiredInboxes(most int) *wiredInboxes {
	w := &wiredInboxes{Sender: Sender{From: &Inbox{}, To: &Inbox{}}}
	w.From.Open(most, func() { w.nearWoken.Add(1) })
	w.To.Open(most, func() { w.farWoken.Add(1) })
	w.Conn = w.To.NewConn()
	return w
}

func notifying(text string) *driver.Batch {
	return &driver.Batch{Op: driver.Write, Tail: driver.NotifyTail, Notify: []byte(text)}
}

// reserve reserves notifications of these texts.
func (w *wiredInboxes) reserve(t *testing.T, texts ...string) (list []*Notification) {
	t.Helper()
	for _, text := range texts {
		n, err := w.Reserve(notifying(text))
		require.NoError(t, err)
		list = append(list, n)
	}
	return list
}

func (w *wiredInboxes) received() (texts []string) {
	var msgs [8]driver.Message
	for _, m := range msgs[:w.To.Receive(msgs[:])] {
		texts = append(texts, fmt.Sprintf("%d %s", m.Conn, m.Data))
	}
	return texts
}

// TestOrder: what ends early waits for what was submitted before it; what failed is left out.
func TestOrder(t *testing.T) {
	w := newWiredInboxes(8)
	list := w.reserve(t, "a", "b", "c", "d")
	w.Post(list[3], nil)
	w.Post(list[1], nil)
	require.Empty(t, w.received(), "before the first")
	require.False(t, w.To.Ready())
	require.Zero(t, w.farWoken.Load())
	w.Post(list[0], nil)
	require.Equal(t, []string{"1 a", "1 b"}, w.received())
	w.Post(list[2], errors.New("failed"))
	require.Equal(t, []string{"1 d"}, w.received())
	require.EqualValues(t, 3, w.farWoken.Load())
	w.Post(nil, nil)
	n, err := w.Reserve(&driver.Batch{Op: driver.Write})
	require.NoError(t, err)
	require.Nil(t, n, "no tail")
	require.Zero(t, w.To.reserved.Load())
}

// TestFull: a slot is taken until Receive, and a sender that found none is alarmed, once.
func TestFull(t *testing.T) {
	w := newWiredInboxes(2)
	list := w.reserve(t, "a", "b")
	for range 3 {
		_, err := w.Reserve(notifying("c"))
		require.ErrorIs(t, err, driver.ErrFull)
	}
	refused := testkit.AllocsPerRun(100, func() { _, _ = w.Reserve(notifying("c")) })
	require.LessOrEqual(t, refused, 2.0, "the message of this test, and no copy of it")
	w.Post(list[0], nil)
	w.Post(list[1], nil)
	require.False(t, w.From.Ready(), "before a slot is free")
	require.Len(t, w.received(), 2)
	require.True(t, w.From.Ready())
	require.False(t, w.From.Ready(), "a second time")
	require.EqualValues(t, 1, w.nearWoken.Load())
	w.reserve(t, "c")
	w.received()
	require.EqualValues(t, 1, w.nearWoken.Load(), "nothing was refused")
}

// TestLastWord needs no slot and gives none back.
func TestLastWord(t *testing.T) {
	w := newWiredInboxes(1)
	w.reserve(t, "a")
	w.To.DeliverLoss(w.Conn)
	require.True(t, w.To.Ready())
	var msgs [2]driver.Message
	require.Equal(t, 1, w.To.Receive(msgs[:]))
	require.Equal(t, driver.Message{Conn: w.Conn, Err: driver.ErrPeerLost}, msgs[0])
	_, err := w.Reserve(notifying("b"))
	require.ErrorIs(t, err, driver.ErrFull, "a second of one")
}

// TestManySenders: every sender that was refused is alarmed.
func TestManySenders(t *testing.T) {
	const senders, each = 8, 200
	to := &Inbox{}
	ready := make(chan struct{}, 1)
	poke := func(c chan struct{}) func() {
		return func() {
			select {
			case c <- struct{}{}:
			default:
			}
		}
	}
	to.Open(2, poke(ready))
	var all sync.WaitGroup
	for range senders {
		from, room := &Inbox{}, make(chan struct{}, 1)
		from.Open(2, poke(room))
		all.Go(func() {
			s := &Sender{From: from, To: to, Conn: to.NewConn()}
			for i := range each {
				for s.Send([]byte{byte(i)}) != nil {
					<-room
				}
			}
		})
	}
	var msgs [3]driver.Message
	var next [senders + 1]byte
	for got := 0; got < senders*each; {
		n := to.Receive(msgs[:])
		for _, m := range msgs[:n] {
			require.Equal(t, next[m.Conn], m.Data[0], "the order of one sender")
			next[m.Conn]++
		}
		if got += n; n == 0 {
			<-ready
		}
	}
	all.Wait()
}

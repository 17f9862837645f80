// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// An owner that has said that it stopped delivers nothing any more: no message that a reader had
// in hand then, behind the look at its age, and none that lies in its chunk behind that one.
func TestNotifsBehindAStopAreNotDelivered(t *testing.T) {
	b := open(t, Config{})
	_, _, conns := welcomed(t, b)
	came, goOn := make(chan struct{}, 2), make(chan struct{})
	t.Cleanup(func() { testpoint.Set(nil); close(goOn) })
	testpoint.Set(func(point string) {
		if point == "tcp: fresh" {
			came <- struct{}{}
			<-goOn
		}
	})
	var notifs []byte // the reader has them in its chunk together
	for number := range uint64(3) {
		h := header{kind: kindNotif, message: number + 1, stamp: b.clock.Now()}
		notifs = append(notifs, frame(h, []byte("late"))...)
	}
	_, err := conns[express].Write(notifs)
	require.NoError(t, err)
	<-came
	_, err = conns[control].Write(frame(header{kind: kindStop}, nil))
	require.NoError(t, err)
	_, _, err = readFrame(conns[control], kindStopped)
	require.NoError(t, err)
	for range 2 {
		goOn <- struct{}{} // the message in hand
		<-came             // it is dealt with
		var msgs [1]driver.Message
		n, err := b.Receive(msgs[:])
		require.NoError(t, err)
		if n > 0 {
			testkit.FatalBroken(t, "%q was delivered after the owner had stopped", msgs[0].Data)
		}
	}
}

// An owner that has lost a connection of a peer acknowledges no message over another, since it
// delivers none: the peer would take it for sent.
func TestNotifsOfAHaltedOwnerAreNotAcknowledged(t *testing.T) {
	for _, last := range []uint8{kindWrite, kindNotif} { // what has its message be due
		g, c, write, notif := handFed(t, open(t, Config{}))
		if last == kindNotif {
			require.NoError(t, write(1))
		} else {
			require.NoError(t, notif(kindNotif, 1))
		}
		g.halted = true
		before := c.queuedBytes()
		if last == kindNotif {
			require.NoError(t, notif(kindNotif, 1))
		} else {
			require.NoError(t, write(1))
		}
		require.Equal(t, before, c.queuedBytes())
		require.Zero(t, g.notifs.unreceived, "messages that were delivered")
	}
}

// A message alone that waits for the socket when Close begins goes all the same: who sent it does
// not wait for its acknowledgement. A batch with bytes is left out, and no message follows it.
func TestCloseSendsQueuedMessages(t *testing.T) {
	b, owner := open(t, Config{}), open(t, Config{})
	p := dial(t, b, owner.Addr())
	local, _ := share(t, b, 64)
	remote, _ := share(t, owner, 64)
	key := importKey(t, p, remote)
	c := p.conns[express]
	c.writeRequests.Add(1) // another goroutine writes, and does not come to it
	d := driver.Desc{Len: 64, LocalKey: local.key, RemoteKey: key}
	for tag, descs := range [][]driver.Desc{nil, {d}, nil} {
		require.NoError(t, p.Submit(uint64(tag), &driver.Batch{Op: driver.Write, Descs: descs,
			Tail: driver.NotifyTail, Notify: []byte{byte(tag)}}))
	}
	p.failQueued(driver.ErrClosed)
	closed := make(chan error, 1)
	go func() { closed <- p.Close() }()
	c.wakeWriter()
	require.Equal(t, []byte{0}, receive(t, owner).Data)
	require.Equal(t, []byte{2}, receive(t, owner).Data)
	require.NoError(t, <-closed)
	var done [4]driver.Completion
	n, err := b.Poll(done[:])
	require.NoError(t, err)
	require.Equal(t, 3, n)
	for _, d := range done[:n] {
		if d.Tag == 1 {
			require.ErrorIs(t, d.Err, driver.ErrClosed)
		} else {
			require.NoError(t, d.Err)
		}
	}
}

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

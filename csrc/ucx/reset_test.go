// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// awaitLoss returns the news that a connection is lost.
func awaitLoss(t *testing.T, c *Context) (news Control) {
	t.Helper()
	require.Eventually(t, func() bool {
		m, ok := c.Control()
		if ok && m.Lost {
			news = m
		}
		return ok && m.Lost
	}, testLimit, time.Millisecond)
	return news
}

// TestAcknowledgementsOfWhatIsNotRead: a peer that acknowledges messages which it has not taken
// does not have a whole transfer copied into messages.
func TestAcknowledgementsOfWhatIsNotRead(t *testing.T) {
	const size = 256 << 20
	buf, err := hostmem.Alloc(size, hostmem.Options{Purpose: "test"})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, buf.Close()) })
	v := openVictim(t)
	require.NoError(t, v.Map(30, Memory{Mem: buf.Bytes(), Ticket: 1}))
	slot, err := v.conn.Import(Import{Key: 1, Size: size, Ticket: 1})
	require.NoError(t, err)
	require.True(t, v.answers())
	v.f.tell("quiet")
	require.NoError(t, submit(v.conn, driver.Write, 77, []driver.Desc{{LocalKey: 30,
		RemoteKey: slot, Len: size}}, nil))
	for range 300 {
		v.f.send(forged{kind: msgAck, conn: v.conn.ID(), seq: 0x3fffffff}, nil)
		time.Sleep(time.Millisecond)
		require.LessOrEqual(t, int(v.conn.Sends()), 1000, "messages that UCX keeps")
	}
}

// TestCreditForWhatIsNotRead: a peer that gives credit for messages which it has not taken, and for
// those of batches that are cancelled, does not have them pile up here.
func TestCreditForWhatIsNotRead(t *testing.T) {
	v := openVictim(t)
	slot, err := v.conn.Import(Import{Key: 1, Size: 1 << 20, Ticket: 1})
	require.NoError(t, err)
	require.True(t, v.answers())
	v.f.tell("quiet")
	descs := make([]driver.Desc, 600)
	for i := range descs {
		descs[i] = driver.Desc{LocalKey: 7, RemoteKey: slot, Len: victimTo - victimFrom}
	}
	for tag := range uint64(4) { // the window is full, and the last ones wait
		require.NoError(t, submit(v.conn, driver.Write, tag, descs, []byte("x")))
	}
	v.gives(t, 4)
	for tag := range uint64(4) {
		v.conn.Cancel(tag)
	}
	v.gives(t, 1<<31)
	for err == nil {
		err = v.conn.Notify(make([]byte, NotifMax))
		require.LessOrEqual(t, int(v.conn.Sends()), 5000, "messages that UCX keeps")
	}
	require.ErrorIs(t, err, driver.ErrFull)
}

// gives has the forger give credit, and sees that it has come.
func (v *victim) gives(t *testing.T, credit uint64) {
	t.Helper()
	v.f.send(forged{kind: msgCredit, conn: v.conn.ID(), off: credit}, nil)
	v.f.send(forged{kind: msgNotif, conn: v.conn.ID()}, nil)
	require.Eventually(t, func() bool {
		_, came := v.Receive()
		return came
	}, testLimit, time.Millisecond)
}

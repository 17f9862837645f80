// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// ask sends a notification and returns the owner's number of the connection that it came by.
func (p *pair) ask(t *testing.T) (conn uint64) {
	t.Helper()
	p.tag++
	b := &driver.Batch{Op: driver.Write, Tail: driver.NotifyTail, Notify: []byte("?")}
	require.NoError(t, p.peer.Submit(p.tag, b))
	require.NoError(t, p.await(t, p.tag))
	var msgs []driver.Message
	eventually(t, "the question", func() bool { msgs = received(t, p.far); return len(msgs) > 0 })
	require.Len(t, msgs, 1)
	return msgs[0].Conn
}

// wakes reports whether a backend that was armed and had nothing is woken.
func wakes(t *testing.T, b *Backend) bool {
	t.Helper()
	fds := []unix.PollFd{{Fd: int32(b.FD()), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, int(patience/time.Millisecond))
	require.NoError(t, err)
	var drained [8]byte
	_, _ = unix.Read(b.FD(), drained[:])
	return n == 1
}

func arm(t *testing.T, b *Backend) (ready bool) {
	t.Helper()
	ready, err := b.Arm()
	require.NoError(t, err)
	return ready
}

// TestAnswers has answers arrive in order over the connection that asked, wake the
// initiator, and stop at the bound until its program takes some.
func TestAnswers(t *testing.T) {
	p := openPair(t, Config{})
	second := p.connect(t)
	conn := p.ask(t)
	require.NotEqual(t, p.peer.Conn(), second.Conn())
	require.NotZero(t, p.peer.Conn())

	require.False(t, arm(t, p.near))
	require.NoError(t, p.far.Answer(conn, nil))
	require.True(t, wakes(t, p.near))
	require.True(t, arm(t, p.near))
	require.Equal(t, []driver.Message{{Conn: p.peer.Conn(), Data: []byte{}}}, received(t, p.near))

	sent, taken := uint64(0), uint64(0)
	fill := func() {
		for {
			data := binary.LittleEndian.AppendUint64(make([]byte, 0, messageMax), sent)
			err := p.far.Answer(conn, data[:messageMax])
			if err != nil {
				require.ErrorIs(t, err, driver.ErrFull)
				return
			}
			sent++
		}
	}
	fill()
	require.EqualValues(t, answersMax-1, sent, "one was taken already, and told with others")
	arm(t, p.far)
	for round := 0; round < 5; taken++ {
		var msgs []driver.Message
		eventually(t, "an answer", func() bool {
			var one [1]driver.Message
			n, err := p.near.Receive(one[:])
			require.NoError(t, err)
			msgs = one[:n]
			return n == 1
		})
		require.Equal(t, p.peer.Conn(), msgs[0].Conn)
		require.Equal(t, taken, binary.LittleEndian.Uint64(msgs[0].Data))
		if (taken+2)%(answersMax/4) == 0 {
			require.True(t, wakes(t, p.far), "room for %d answers", answersMax/4)
			require.True(t, arm(t, p.far))
			fill()
			round++
		}
	}
	require.NoError(t, second.Close())
}

// TestAnswersEnd has the end of a connection end its answers, also for a program that waits
// for room.
func TestAnswersEnd(t *testing.T) {
	p := openPair(t, Config{})
	conn := p.ask(t)
	for range answersMax {
		require.NoError(t, p.far.Answer(conn, []byte("!")))
	}
	require.ErrorIs(t, p.far.Answer(conn, []byte("!")), driver.ErrFull)
	require.ErrorIs(t, p.far.Answer(conn+100, nil), driver.ErrPeerLost)
	require.ErrorIs(t, p.near.Answer(p.peer.Conn(), nil), driver.ErrPeerLost,
		"a connection of our own")
	require.ErrorIs(t, p.far.Answer(conn, make([]byte, messageMax+1)), driver.ErrBounds)
	arm(t, p.far)
	eventually(t, "the first answer", func() bool { return p.near.answers.waiting.Load() > 0 })
	require.NoError(t, p.peer.Close())
	require.Empty(t, received(t, p.near), "of a connection that the program has closed")
	require.True(t, wakes(t, p.far))
	require.ErrorIs(t, p.far.Answer(conn, nil), driver.ErrPeerLost)
	var msgs []driver.Message
	eventually(t, "the last word", func() bool {
		msgs = append(msgs, received(t, p.far)...)
		return len(msgs) > 0
	})
	require.Equal(t, []driver.Message{{Conn: conn, Err: driver.ErrPeerLost}}, msgs)
	require.ErrorIs(t, p.far.Answer(conn, nil), driver.ErrPeerLost)
}

// TestTooManyAnswers is of an owner that does not keep to the bound: it is lost.
func TestTooManyAnswers(t *testing.T) {
	p := openPair(t, Config{})
	var owner *inbound
	p.far.mu.Lock()
	for c := range p.far.accepted {
		owner = c
	}
	p.far.mu.Unlock()
	for range answersMax + 1 {
		owner.ch.send((&answer{data: []byte("!")}).encode())
	}
	<-p.peer.Lost()
}

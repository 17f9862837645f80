// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// receive waits for the next message of a backend.
func receive(tb testing.TB, b *Backend) driver.Message {
	tb.Helper()
	var msgs [1]driver.Message
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(50 * time.Microsecond) {
		n, err := b.Receive(msgs[:])
		require.NoError(tb, err)
		if n == 1 {
			return msgs[0]
		}
	}
	require.Fail(tb, "no message arrives")
	return driver.Message{}
}

// drain has the owner receive what its peers sent. A connection that ends may have a last word, or
// none where the owner had not yet read that the peer's program has it.
func drain(tb testing.TB, b *Backend) {
	tb.Helper()
	var msgs [8]driver.Message
	_, err := b.Receive(msgs[:])
	require.NoError(tb, err)
}

// notify sends a message and waits until it is on its way.
func notify(tb testing.TB, p *peer, text string) {
	tb.Helper()
	msg := &driver.Batch{Op: driver.Write, Tail: driver.NotifyTail, Notify: []byte(text)}
	require.NoError(tb, p.Submit(1, msg))
	require.NoError(tb, await(tb, p.b, 1))
}

// Answers come back by the connection of the question, in order. Where the initiator does not
// receive them the owner finds no room, and is woken once there is some.
func TestAnswersHaveCredit(t *testing.T) {
	testkit.CheckLeaks(t)
	const room = 8
	owner, near := open(t, Config{}), open(t, Config{NotifyMax: room})
	p, other := dial(t, near, owner.Addr()), dial(t, near, owner.Addr())
	require.NotZero(t, p.Conn())
	require.NotEqual(t, p.Conn(), other.Conn())
	notify(t, p, "question")
	question := receive(t, owner)
	require.Equal(t, "question", string(question.Data))
	require.NotZero(t, question.Conn)
	text := make([]byte, 8)
	sent := uint64(0)
	answer := func() error {
		binary.LittleEndian.PutUint64(text, sent)
		err := owner.Answer(question.Conn, text)
		if err == nil {
			sent++
		}
		return err
	}
	for range room {
		require.NoError(t, answer())
	}
	require.ErrorIs(t, answer(), driver.ErrFull)
	got := uint64(0)
	for got < 20*room {
		m := receive(t, near)
		require.Equal(t, p.Conn(), m.Conn)
		require.Equal(t, got, binary.LittleEndian.Uint64(m.Data))
		got++
		for sent < 20*room && answer() == nil {
			continue
		}
		if sent < 20*room && sent == got { // all are received: room is on its way
			for answer() != nil {
				ready, err := owner.Arm()
				require.NoError(t, err)
				if !ready {
					require.NoError(t, owner.event.Wait())
				}
			}
		}
	}
	require.ErrorIs(t, owner.Answer(question.Conn, make([]byte, messageLimit)), driver.ErrBounds)
	require.ErrorIs(t, owner.Answer(1<<40, nil), driver.ErrPeerLost)
	require.NoError(t, p.Close())
	last := receive(t, owner)
	require.Equal(t, question.Conn, last.Conn)
	require.ErrorIs(t, last.Err, driver.ErrPeerLost)
	require.ErrorIs(t, owner.Answer(question.Conn, nil), driver.ErrPeerLost)
	notify(t, other, "still here")
	require.NotEqual(t, question.Conn, receive(t, owner).Conn)
}

// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// TestAnswersToAPeerThatDoesNotRead: it claims to have room for 65,536 of them, and they are kept
// only as far as a bound of ours. The program is woken when it reads.
func TestAnswersToAPeerThatDoesNotRead(t *testing.T) {
	b := open(t, Config{})
	c := rawDial(t, b)
	h := header{kind: kindHello, count: 2, id: creditMax, key: messageLimit}
	_, err := c.Write(frame(h, b.address.owner[:]))
	require.NoError(t, err)
	w, secret, err := readFrame(c, kindWelcome)
	require.NoError(t, err)
	express := rawDial(t, b)
	_, err = express.Write(frame(header{kind: kindJoin, id: w.id, count: 1}, secret[:16]))
	require.NoError(t, err)
	_, _, err = readFrame(express, kindWelcome)
	require.NoError(t, err)
	b.mu.Lock()
	g := b.accepted[w.id]
	b.mu.Unlock()
	answer := make([]byte, b.cfg.MessageMax)
	for ready := true; ready; { // until the kernel takes no more, now and then a little later
		for err == nil {
			require.Less(t, g.conns[control].queuedBytes(), queuedMax+bodyMax)
			err = b.Answer(g.connID, answer)
		}
		require.ErrorIs(t, err, driver.ErrFull)
		ready, err = b.Arm()
		require.NoError(t, err)
	}
	go func() { _, _ = io.Copy(io.Discard, c) }()
	require.Eventually(t, func() bool { return b.Answer(g.connID, answer) == nil }, limit,
		time.Millisecond)
	poll := [1]unix.PollFd{{Fd: int32(b.FD()), Events: unix.POLLIN}}
	n, err := unix.Poll(poll[:], int(limit.Milliseconds()))
	require.NoError(t, err)
	require.Equal(t, 1, n, "the program is woken")
}

// TestConfirmationsToAnOwnerThatDoesNotRead are dropped once too many wait: it asks again.
func TestConfirmationsToAnOwnerThatDoesNotRead(t *testing.T) {
	owner, b := open(t, Config{}), open(t, Config{})
	p := dial(t, b, owner.Addr())
	c := p.conns[control]
	c.writeMu.Lock() // nothing is written
	for range queuedMax {
		p.confirm(c, &header{id: 1})
	}
	require.LessOrEqual(t, c.queuedBytes(), queuedMax+headBytes)
	c.writeMu.Unlock()
}

// TestReadsThatWaitAreBounded by bytes, and come out as they went in.
func TestReadsThatWaitAreBounded(t *testing.T) {
	var s readQueue
	body := make([]byte, entriesMax*entryBytes)
	var next, due uint64
	push := func(n int) bool {
		h := header{kind: kindRead, count: uint32(n / entryBytes), length: uint32(n), id: next}
		body[0] = byte(next)
		if !s.push(&h, body[:n]) {
			return false
		}
		next++
		return true
	}
	pop := func() {
		var h header
		var table [entriesMax * entryBytes]byte
		got, ok := s.pop(&h, table[:])
		require.True(t, ok)
		require.Equal(t, due, h.id)
		require.Equal(t, byte(due), got[0])
		require.Len(t, got, int(h.length))
		due++
	}
	for _, n := range []int{entryBytes, len(body), 7 * entryBytes} {
		for push(n) {
		}
		require.Equal(t, readsMax/(headBytes+n), int(next-due))
		for range 10_000 {
			pop()
			require.True(t, push(n))
			require.LessOrEqual(t, cap(s.frames), 2*readsMax)
		}
		for due < next {
			pop()
		}
	}
}

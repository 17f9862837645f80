// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/park"
	"github.com/sluicehq/sluice/internal/testing/promise"
)

// patientGrace is one that no stall of the machine outlasts: the clock is moved on past the Failure
// that openContext makes of it.
const (
	patientGrace = 10 * time.Second
	pastFailure  = 6 * patientGrace
)

// TestNoStoreBehindAReset has a writer that stores into mapped memory give up an owner that stands
// still, and tell it so. Once the owner has heard that, it asks the writer no more: its fence ends
// at once, and no byte of the batches that were under way may land behind it.
func TestNoStoreBehindAReset(t *testing.T) {
	spots, late, w := openSpots(t), openSpots(t), ways[0]
	w.config.GraceNanos = uint64(patientGrace)
	writer, owner := w.config, w.config
	writer.Spots, owner.Spots = late, spots
	l := openLaneOf(t, w, writer, owner)
	fill(l.local, 1)
	beside := openContext(t, w.config, l.wake)
	mapped(t, beside, false)
	t.Cleanup(func() { require.NoError(t, beside.Close()) })

	standing := make([]byte, 4096) // the owner's thread stands where it lands a write into this
	require.NoError(t, l.far.Map(testKey+1, Memory{Mem: standing, Ticket: 1}))
	conn, back := join(t, beside, l.far)
	slot, err := conn.Import(Import{Key: testKey + 1, Size: 4096, Ticket: 1})
	require.NoError(t, err)
	goOn := stand(t, spots, AtCopy, func() error {
		return submit(conn, driver.Write, 1, []driver.Desc{{LocalKey: testKey, RemoteKey: slot,
			Len: 64}}, nil)
	})
	l.storeUntilLost(t)
	late.Park(AtStore) // a store that comes all the same stands until the fence is over
	goesOn := func() { late.Park(AtNone); _ = late.Leave() }
	t.Cleanup(goesOn)
	require.NoError(t, goOn())
	require.True(t, awaitLoss(t, l.far).Over)
	l.back.End(Lost, true)
	require.NoError(t, l.far.Fence(testKey, 2, testLimit))
	clear(l.remote)
	goesOn()
	zeros := make([]byte, testBytes)
	for end := time.Now().Add(100 * time.Millisecond); time.Now().Before(end); {
		if !bytes.Equal(zeros, l.remote) {
			promise.Broken(t, "a byte landed behind the fence")
		}
	}
	l.conn.End(Lost, false)
	require.NoError(t, conn.Close(testLimit))
	require.NoError(t, back.Close(testLimit))
}

// storeUntilLost has batches of direct stores under way when the owner is given up.
func (l *lane) storeUntilLost(t *testing.T) {
	t.Helper()
	var done [8]ring.Done
	descs := make([]driver.Desc, 64)
	for i := range descs {
		descs[i] = l.desc(0, 0, testBytes)
	}
	for end := time.Now().Add(testLimit); ; l.near.Poll(done[:]) {
		require.True(t, time.Now().Before(end), "the owner is not given up")
		var err error
		for err == nil {
			err = submit(l.conn, driver.Write, 1, descs, nil)
		}
		require.True(t, errors.Is(err, driver.ErrFull) || errors.Is(err, driver.ErrPeerLost),
			"%v", err)
		l.near.Elapse(pastFailure)
		for m, ok := l.near.Control(); ok; m, ok = l.near.Control() {
			if m.Lost {
				return
			}
		}
	}
}

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

// TestFencesBehindAnEndThatWasGivenUp: its writer lives and answers the reset. A fence asks it no
// more, so that one hiccup spoils no fence of later ones.
func TestFencesBehindAnEndThatWasGivenUp(t *testing.T) {
	spots, w := openSpots(t), ways[0]
	w.config.GraceNanos = uint64(patientGrace)
	writer := w.config
	writer.Spots = spots
	l := openLaneOf(t, w, writer, w.config)
	goOn := stand(t, spots, AtStore, func() error {
		return submit(l.conn, driver.Write, 1, []driver.Desc{l.desc(0, 0, 64)}, nil)
	})
	var err error
	for err == nil { // the owner waits for the writer to take messages
		err = l.back.Notify([]byte("x"))
	}
	require.ErrorIs(t, err, driver.ErrFull)
	l.far.Elapse(pastFailure)
	require.False(t, awaitLoss(t, l.far).Over)
	require.ErrorIs(t, l.far.Fence(testKey, 2, 10*time.Millisecond), driver.ErrTimeout,
		"it may be in the middle of a store")
	require.NoError(t, goOn())
	require.True(t, awaitLoss(t, l.near).Over)
	require.True(t, awaitLoss(t, l.far).Over, "the writer's last word")
	l.conn.End(Lost, true)
	require.NoError(t, l.far.Fence(testKey, 0, testLimit))
	again, back := join(t, l.near, l.far)
	x, _ := l.far.Export(testKey)
	_, err = again.Import(Import{Key: testKey, Size: testBytes, Ticket: 2, Export: x})
	require.NoError(t, err)
	require.NoError(t, l.far.Fence(testKey, 3, testLimit))
	require.NoError(t, again.Close(testLimit))
	require.NoError(t, back.Close(testLimit))
}

// TestAcknowledgementsOfWhatIsNotRead: a peer that acknowledges messages which it has not taken
// does not have a whole transfer copied into messages.
func TestAcknowledgementsOfWhatIsNotRead(t *testing.T) {
	const size = 256 << 20
	buf, err := hostmem.Alloc(size, hostmem.Options{Purpose: "test"})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, buf.Close()) })
	v := openVictim(t, ways[len(ways)-1])
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
	v := openVictim(t, ways[len(ways)-1])
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

// TestFreshPagesGoWithTheirAllocation: those that a fence puts there are of another kind.
func TestFreshPagesGoWithTheirAllocation(t *testing.T) {
	const size = 64 << 20
	wake, err := park.NewEvent()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, wake.Close()) })
	c := openContext(t, ways[0].config, wake)
	before := sharedBytes(t)
	for range 2 {
		a, err := c.Allocate(size)
		require.NoError(t, err)
		require.NoError(t, c.Map(testKey, Memory{Mem: a.Bytes(), Ticket: 5, In: a}))
		for i := range a.Bytes() {
			a.Bytes()[i] = 1
		}
		require.NoError(t, c.Refresh(testKey))
		c.Unmap(testKey)
		require.NoError(t, a.Close())
	}
	require.NoError(t, c.Close())
	require.Less(t, sharedBytes(t), before+size)
}

// sharedBytes are those of shared pages that this process has in memory.
func sharedBytes(t *testing.T) (n uint64) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/status")
	require.NoError(t, err)
	_, rest, found := strings.Cut(string(text), "RssShmem:")
	require.True(t, found)
	_, err = fmt.Sscan(rest, &n)
	require.NoError(t, err)
	return n << 10
}

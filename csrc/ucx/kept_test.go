// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// TestCloseBesideAPeerThatStands closes a context whose messages fill the queue of a near peer that
// stands still: it says so within its limit, and is given back once the peer has gone on.
func TestCloseBesideAPeerThatStands(t *testing.T) {
	before := Kept()
	spots := openSpots(t)
	w := ways[2]
	w.config.Spots = spots
	// A queue that the window of one connection more than fills, messages of its wiring or not.
	w.config.Settings = []string{"MM_SEG_SIZE=16k", "MM_FIFO_SIZE=32", "RNDV_THRESH=inf"}
	l := openLane(t, w)
	conns, backs := []*Conn{l.conn}, []*Conn{l.back}
	for range 19 {
		conn, back := join(t, l.near, l.far)
		_, err := conn.Import(Import{Key: testKey, Size: testBytes, Ticket: 1})
		require.NoError(t, err)
		conns, backs = append(conns, conn), append(backs, back)
	}
	d := []driver.Desc{l.desc(0, 0, testBytes)}
	goOn := stand(t, spots, AtCopy, func() error { return submit(l.conn, driver.Write, 0, d, nil) })
	for i, c := range conns[1:4] { // more messages than the queue has places
		require.NoError(t, submit(c, driver.Write, uint64(1+i), d, nil))
	}
	for _, c := range conns {
		require.NoError(t, c.Notify(nil))
		require.Eventually(t, func() bool { return c.Sends() > 0 }, testLimit, time.Millisecond)
	}
	l.closed = true
	t.Cleanup(func() { _ = l.far.Close() }) // where the test fails before it does that
	l.near.Elapse(2 * testGrace)            // what is on its way is too old to land unasked
	for _, c := range conns {
		_ = c.Close(10 * time.Millisecond)
	}
	begin := time.Now()
	require.ErrorIs(t, l.near.Close(), ErrKept)
	require.Less(t, time.Since(begin), testLimit/2, "however many messages wait")
	require.Equal(t, before+1, Kept())
	require.NoError(t, goOn())
	for _, b := range backs {
		_ = b.Close(10 * time.Millisecond)
	}
	require.Eventually(t, func() bool { return Kept() == before }, testLimit, time.Millisecond)
	require.NoError(t, l.far.Close())
}

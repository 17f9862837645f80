// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/promise"
)

// TestAnswersAreOfTheirEpoch revokes memory that a peer reads who does not take the answers, and
// changes it: what is sent later is what was there before.
func TestAnswersAreOfTheirEpoch(t *testing.T) {
	v := openVictim(t)
	region := v.mem[victimFrom:victimTo]
	for i := range region {
		region[i] = 0x11
	}
	const asked = 300
	for seq := range uint32(asked) {
		v.f.send(forged{kind: msgRead, conn: v.conn.ID(), seq: seq, ticket: victimTicket,
			key: 7, size: victimTo - victimFrom}, nil)
	}
	require.NoError(t, v.Revoke(7, testLimit))
	for i := range region {
		region[i] = 0xee
	}
	v.f.send(forged{kind: msgRead, conn: v.conn.ID(), seq: asked, ticket: victimTicket, key: 7,
		size: 8}, nil)
	for range asked + 1 {
		if v.f.await(msgData).seq == asked {
			break
		}
	}
	if v.f.late > 0 {
		promise.Broken(t, "bytes that were written after the revoke were sent")
	}
}

// TestNoBatchWaitsForTheTick submits while the thread goes to sleep, which it does for minutes
// here.
func TestNoBatchWaitsForTheTick(t *testing.T) {
	c := overTCP
	c.GraceNanos = uint64(time.Hour)
	l := openLane(t, c)
	for range 2000 {
		l.tag++
		require.NoError(t, submit(l.conn, driver.Write, l.tag,
			[]driver.Desc{l.desc(0, 0, 256<<10)}, nil))
		require.NoError(t, l.outcome(t, l.tag))
		// Somewhat longer and shorter than the thread looks before it sleeps.
		for begin := time.Now(); time.Since(begin) < time.Duration(l.tag%40)*time.Microsecond; {
		}
	}
}

// TestListThatChanges has a program change an index list while it submits: the bytes beyond what
// was imported stay as they are.
func TestListThatChanges(t *testing.T) {
	const entry, count = 4096, 64
	l := openLane(t, overTCP)
	slot, err := l.conn.Import(Import{Key: testKey, Size: testBytes / 2, Ticket: 1})
	require.NoError(t, err)
	list := make([]uint32, count)
	for i := range list {
		list[i] = uint32(i)
	}
	for i := range l.local[:count*entry] {
		l.local[i] = 0x5a
	}
	beyond := l.remote[testBytes/2:]
	var stop atomic.Bool
	over := make(chan struct{})
	go func() {
		defer close(over)
		for !stop.Load() { // the program's mistake
			atomic.StoreUint32(&list[count-1], testBytes/entry/2)
			atomic.StoreUint32(&list[count-1], count-1)
		}
	}()
	p := driver.Pattern{Count: count, Run: entry, Local: driver.Side{Stride: entry},
		Remote: driver.Side{Stride: entry, List: list}, LocalKey: testKey, RemoteKey: slot}
	for range 20000 {
		l.tag++
		if submitPattern(l.conn, driver.Write, l.tag, &p, nil) == nil {
			_ = l.outcome(t, l.tag)
		}
	}
	stop.Store(true)
	<-over
	if beyond[0] == 0x5a {
		promise.Broken(t, "bytes beyond what was imported were written")
	}
}

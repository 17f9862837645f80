// SPDX-License-Identifier: Apache-2.0

package files

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// sleeping is an idle Mover in which the test ends each Sleep.
type sleeping struct {
	*idle
	asleep chan int // a goroutine sleeps, for so many landings
	wake   chan struct{}
	needed bool // the last argument of Listen; guarded by Core.Mu
	wakes  int  // guarded by Core.Mu
}

func (m *sleeping) Waits(n int) int  { return min(n, len(m.with)) }
func (m *sleeping) Listen(need bool) { m.needed = need }
func (m *sleeping) Kick()            {}

func (m *sleeping) Sleep(n int) {
	m.asleep <- n
	<-m.wake
}

func (m *sleeping) Wake() {
	m.c.Mu.Lock()
	defer m.c.Mu.Unlock()
	m.wakes++
}

func newSleeping(t *testing.T) (*rig, *sleeping) {
	t.Helper()
	r := newRig(t)
	m := &sleeping{idle: r.m, asleep: make(chan int), wake: make(chan struct{})}
	r.c.Mover = m
	return r, m
}

// write begins a write of two pieces that are apart.
func (r *rig) write(tag uint64, durable bool) {
	r.t.Helper()
	require.NoError(r.t, r.p.Submit(tag, &driver.Batch{Op: driver.Write, Durable: durable,
		Descs: []driver.Desc{
			{Len: 10, LocalKey: r.mem.Key(), RemoteKey: r.key},
			{Local: 50, Remote: 50, Len: 10, LocalKey: r.mem.Key(), RemoteKey: r.key},
		}}))
}

// help has a goroutine help until the batch of a tag has ended.
func (r *rig) help(tag uint64) (did chan bool) {
	did = make(chan bool, 1)
	go func() { did <- r.p.Help(tag, nil) }()
	return did
}

// land ends so many requests, without serving them. It returns their kinds.
func (r *rig) land(n int) (kinds []Kind) {
	r.c.Mu.Lock()
	defer r.c.Mu.Unlock()
	for range n {
		kinds = append(kinds, r.m.with[0].Kind)
		r.m.land(r.m.with[0], nil)
	}
	return kinds
}

func (r *rig) ended() []driver.Completion {
	r.t.Helper()
	done := make([]driver.Completion, 8)
	n, err := r.Poll(done)
	require.NoError(r.t, err)
	return done[:n]
}

// TestHelpSleepsOnce for all writes of a durable batch and once for the sync that begins behind
// them. The batch is not done before that has ended, and nobody else is woken.
func TestHelpSleepsOnce(t *testing.T) {
	r, m := newSleeping(t)
	r.write(1, true)
	r.c.Mu.Lock()
	require.True(t, m.needed, "nobody serves a durable batch")
	r.c.Mu.Unlock()
	did := r.help(1)
	require.Equal(t, 2, <-m.asleep)
	r.c.Mu.Lock()
	require.False(t, m.needed)
	require.True(t, r.c.Helped())
	r.c.Mu.Unlock()
	require.False(t, r.p.Help(1, nil), "another goroutine helps already")
	require.Equal(t, []Kind{Write, Write}, r.land(2))
	m.wake <- struct{}{}
	require.Equal(t, 1, <-m.asleep)
	require.Empty(t, r.ended())
	require.Equal(t, []Kind{Sync}, r.land(1))
	m.wake <- struct{}{}
	require.True(t, <-did)
	require.Equal(t, []driver.Completion{{Tag: 1}}, r.ended())
	require.Zero(t, m.wakes)
	require.Nil(t, r.c.helped)
}

// TestHelpLeavesTwoAlone: while another batch is under way its program is woken, or the Mover
// serves it, and who helped goes.
func TestHelpLeavesTwoAlone(t *testing.T) {
	r, m := newSleeping(t)
	r.write(1, false)
	did := r.help(1)
	require.Equal(t, 2, <-m.asleep)
	r.write(2, true)
	r.c.Mu.Lock()
	require.False(t, r.c.Helped())
	require.True(t, m.needed, "nobody serves the durable batch")
	r.c.Mu.Unlock()
	require.False(t, r.p.Help(2, nil))
	m.wake <- struct{}{}
	require.True(t, <-did)
	require.Empty(t, r.ended())
	r.land(4)
	r.c.Serve()
	require.Equal(t, []driver.Completion{{Tag: 1}}, r.ended())
	require.Equal(t, 1, m.wakes)
	r.land(1)
	r.c.Serve()
	require.Equal(t, []driver.Completion{{Tag: 2}}, r.ended())
}

// TestHelpEndsWithARevoke of its memory, which waits until the requests have ended.
func TestHelpEndsWithARevoke(t *testing.T) {
	r, m := newSleeping(t)
	r.write(1, false)
	did := r.help(1)
	require.Equal(t, 2, <-m.asleep)
	over := make(chan error, 1)
	go func() { over <- r.file.Revoke(t.Context()) }()
	for { // until the requests are cancelled, which lands them
		r.c.Mu.Lock()
		waits := r.c.waiters > 0 && m.needed
		r.c.Mu.Unlock()
		if waits {
			break
		}
	}
	require.Empty(t, over)
	m.wake <- struct{}{}
	require.True(t, <-did)
	require.NoError(t, <-over)
	ended := r.ended()
	require.Len(t, ended, 1)
	require.ErrorIs(t, ended[0].Err, driver.ErrRevoked)
}

// TestHelpStops where it is asked to, and has nothing to do for a batch that has ended.
func TestHelpStops(t *testing.T) {
	r, m := newSleeping(t)
	r.write(1, false)
	stop := make(chan struct{})
	did := make(chan bool, 1)
	go func() { did <- r.p.Help(1, stop) }()
	require.Equal(t, 2, <-m.asleep)
	close(stop)
	m.wake <- struct{}{}
	require.True(t, <-did)
	require.False(t, r.p.Help(1, stop))
	require.False(t, r.p.Help(2, nil), "no such batch")
	r.land(2)
	r.c.Serve()
	require.Equal(t, 1, m.wakes)
	require.False(t, r.p.Help(1, nil))
	require.Len(t, r.ended(), 1)
}

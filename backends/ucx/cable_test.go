// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"bytes"
	"errors"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testing/machine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// betweenHosts runs the test once more on a host of its own, where the backend of
// this process finds what that host has and no more. There it returns the host at
// the other end of the cable; here it returns nil, when that is over.
func betweenHosts(t *testing.T) *machine.Host {
	t.Helper()
	far, err := machine.BetweenHosts(t, func(*machine.Pair) error { // skips where there is no UCX
		b, err := New(Config{})
		if err != nil {
			return err
		}
		return b.Close()
	})
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	return far
}

// TestTimedBetweenHosts is over a cable. Nobody tells UCX which: it has to find the device, and
// not to take what shares memory.
func TestTimedBetweenHosts(t *testing.T) { overCable(t, drivertest.Streaming...) }

func TestSoakBetweenHosts(t *testing.T) { overCable(t) }

func overCable(t *testing.T, only ...string) {
	t.Helper()
	far := betweenHosts(t)
	if far == nil {
		return
	}
	h := harness
	h.Start, h.Wirings, h.Only = far.Start, drivertest.Processes, only
	drivertest.Run(t, h)
}

// TestTimedCable interrupts what is between two hosts while bytes move both ways.
func TestTimedCable(t *testing.T) {
	interrupted(t, func(far *machine.Host, on bool) error { return far.Plug(!on) })
}

// TestSoakPacketsAstray sends what the far host sends to a station that is none, so that only its
// own packets are lost: it goes on to hear the near one.
func TestSoakPacketsAstray(t *testing.T) {
	interrupted(t, func(far *machine.Host, on bool) error {
		args := []string{"neigh", "del", "192.0.2.1", "dev", "cable0"}
		if on {
			args = []string{"neigh", "replace", "192.0.2.1", "lladdr", "02:00:00:00:00:99", "nud",
				"permanent", "dev", "cable0"}
		}
		ip := exec.Command("ip", args...)
		return errors.Join(far.Do(ip.Start), ip.Wait())
	})
}

// What the cable takes away: cableGrace is Grace and Failure, and slack is what a machine with more
// to do may add to what is promised.
const (
	cableGrace = time.Second
	slack      = 1500 * time.Millisecond
)

// interrupted cuts the way three times: until both sides have found out, until ours has, and until
// we have closed the connection. What has ended by then lands on neither side when the way is open
// again, and then all goes on.
func interrupted(t *testing.T, cut func(far *machine.Host, on bool) error) {
	t.Helper()
	far := betweenHosts(t)
	if far == nil {
		return
	}
	c := Config{Grace: cableGrace, Failure: cableGrace}
	o := startOwner(t, c, c, far.Start)
	lost := func() { t.Helper(); o.does("lost", driver.ErrPeerLost.Error()) }
	connect := func() (driver.Peer, uint32) { // what lies between may need a moment
		t.Helper()
		for end := time.Now().Add(patience); ; {
			p, key, err := o.tryConnect()
			if err == nil {
				return p, key
			}
			require.True(t, time.Now().Before(end), "connect: %v", err)
		}
	}
	soon := func(what string, begin time.Time, promised time.Duration) {
		t.Helper()
		took := time.Since(begin)
		t.Logf("%s after %v, promised within %v", what, took.Round(time.Millisecond), promised)
		require.LessOrEqual(t, took, promised+slack, what)
	}
	for _, round := range []string{"both find out", "one finds out", "closed before"} {
		t.Log(round)
		p, key := connect()
		f := o.flood(p, key)
		f.run(10)
		begin := time.Now()
		require.NoError(t, cut(far, true))
		if round == "closed before" {
			require.NoError(t, p.Close())
			soon("the connection closed", begin, 3*cableGrace)
		}
		f.run(0)
		soon("the batches ended", begin, 3*cableGrace)
		if round == "both find out" {
			lost()
			soon("the owner had the last word", begin, (session.IdleFailures+1)*cableGrace)
		}
		o.does("clear", "<nil>")
		for i := range o.from {
			o.from[i] = 0xe2
		}
		want := bytes.Clone(o.from)
		require.NoError(t, cut(far, false))
		for end := time.Now().Add(1500 * time.Millisecond); time.Now().Before(end); {
			// An owner that was in the middle of a copy ends it.
			if n := o.landed(); n > 60<<10 {
				testkit.FatalBroken(t, "%d bytes of writes that had ended landed", n)
			}
			if !bytes.Equal(want, o.from) {
				testkit.FatalBroken(t, "bytes of reads that had ended landed")
			}
		}
		require.NoError(t, p.Close())
		if round != "both find out" { // heard above
			lost()
		}
	}
	p, _ := connect()
	require.NoError(t, p.Close())
	lost()
}

// flood keeps a write of the first half of the memories and a read of the second under way.
type flood struct {
	o      *owner
	peer   driver.Peer
	key    uint32
	first  uint64 // tag: even ones write
	failed [2]bool
}

func (o *owner) flood(p driver.Peer, key uint32) *flood {
	o.t.Helper()
	o.tag += 2 - o.tag%2
	f := &flood{o: o, peer: p, key: key}
	for range 2 {
		f.begin(o.tag)
		o.tag++
	}
	return f
}

func (f *flood) begin(tag uint64) {
	op, at := driver.Op(driver.Write), uint64(0)
	if tag%2 == 1 {
		op, at = driver.Read, ownerBytes/2
	}
	d := []driver.Desc{{Local: at, Remote: at, Len: ownerBytes / 2, LocalKey: f.o.mem.Key(),
		RemoteKey: f.key}}
	if err := f.peer.Submit(tag, &driver.Batch{Op: op, Descs: d}); err != nil {
		f.failed[tag%2] = true
	}
}

// run goes on for so many batches, or, if that is 0, until both have failed.
func (f *flood) run(batches int) {
	f.o.t.Helper()
	var done [2]driver.Completion
	for end, ended := time.Now().Add(patience), 0; batches > ended || batches == 0 &&
		f.failed != [2]bool{true, true}; {
		n, err := f.o.b.Poll(done[:])
		require.NoError(f.o.t, err)
		for _, c := range done[:n] {
			if ended++; c.Err == nil {
				f.begin(c.Tag)
				continue
			}
			f.failed[c.Tag%2] = true
			require.True(f.o.t, batches == 0 && (errors.Is(c.Err, driver.ErrPeerLost) ||
				errors.Is(c.Err, driver.ErrClosed)), "%v", c.Err)
		}
		require.True(f.o.t, time.Now().Before(end), "the batches do not end")
	}
}

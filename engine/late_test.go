// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/fault"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// until waits for what another goroutine brings about.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !ok(); time.Sleep(time.Millisecond) {
		require.False(t, time.Now().After(end), "%s: not after %v", what, limit)
	}
}

// TestOutcomeIsFinal has an Abort go on after it has seen the transfer posted: by then success
// was told, and what it does must change nothing.
func TestOutcomeIsFinal(t *testing.T) {
	f := &fake{manual: true}
	p, src, m := overFake(t, f, time.Minute)
	tr := transfer(t, p, Write)
	check(t, tr.Add(src, 0, m, 0, 100))
	check(t, tr.Post())
	generation, ok := tr.pin() // as Abort does
	require.True(t, ok)
	f.finishOne(nil)
	require.NoError(t, tr.Wait(within(t)))
	tr.interrupt(generation, ErrAborted)
	tr.abandon(generation) // nor does the sweeper
	tr.unpin()
	require.NoError(t, tr.Err())
	require.NoError(t, tr.Abort(within(t)))
	check(t, tr.Post())
	f.finishOne(nil)
	require.NoError(t, tr.Wait(within(t)), "the next post has the cause of the last")
}

// TestAbortEndsItsOwnPostAlone has an Abort go on after the post that it was to end has ended,
// and another goroutine has posted anew: that post moves all of its batches, also the last, which
// was not submitted yet.
func TestAbortEndsItsOwnPostAlone(t *testing.T) {
	f := &fake{manual: true}
	p, src, m := overFake(t, f, time.Minute)
	tr := transfer(t, p, Write)
	scattered(t, tr, src, m, 2)
	check(t, tr.Notify([]byte("end"))) // goes with the second batch, which waits for the first
	succeed := func() {
		t.Helper()
		for range 2 {
			until(t, "a batch is under way", func() bool { tr.Done(); return f.finishOne(nil) })
		}
		require.NoError(t, tr.Wait(within(t)))
	}
	check(t, tr.Post())
	first := tr.state().generation() // as Abort reads it
	succeed()
	check(t, tr.Post())
	require.NoError(t, tr.abort(within(t), first))
	succeed()
	require.Equal(t, []int{1, -1, 1, -1}, f.seen(), "an Abort of the post before has ended it")
}

// TestAbortOfAnUnansweredPost is asked about a post for whose pieces the peer did not answer,
// after another goroutine has posted anew: that is no proof either.
func TestAbortOfAnUnansweredPost(t *testing.T) {
	f := &fake{manual: true}
	p, src, m := overFake(t, f, time.Minute)
	tr := transfer(t, p, Write)
	check(t, tr.Add(src, 0, m, 0, 100))
	check(t, tr.Post())
	first := tr.state().generation()
	f.finishOne(ErrUnproven)
	require.ErrorIs(t, tr.Wait(within(t)), ErrUnproven)
	check(t, tr.Post())
	require.ErrorIs(t, tr.abort(within(t), first), ErrUnproven)
	f.finishOne(nil)
	require.NoError(t, tr.Wait(within(t)))
	require.NoError(t, tr.Abort(within(t)))
}

// TestOutcomeIsFinalUnderAborts looks at outcomes while another goroutine aborts.
func TestOutcomeIsFinalUnderAborts(t *testing.T) {
	a, b := open(t, "a"), open(t, "b")
	src := register(t, a, "src", 1<<20)
	register(t, b, "dst", 1<<20)
	p := connect(t, a, b)
	tr := transfer(t, p, Write)
	check(t, tr.Add(src, 0, remote(t, p, "dst"), 0, 128<<10))
	start, ended := make(chan struct{}), make(chan struct{})
	go func() {
		for range start {
			_ = tr.Abort(context.Background())
			ended <- struct{}{}
		}
	}()
	defer close(start)
	for i := range 3000 {
		check(t, tr.Post())
		for range i % 400 { // another moment each time
			_ = tr.state()
		}
		start <- struct{}{}
		for tr.state().phase() != done {
		}
		first := tr.Err()
		<-ended
		require.Equal(t, first, tr.Err(), "post %d", i)
	}
}

// slowPut is a warm chain from a to b whose peer has a piece in hand, and a link between them.
func slowPut(t *testing.T) (a, b *host, k *link, tr *Transfer, before []byte) {
	wire, k := tcpBehind(t)
	a, b = newHostOver(t, plainTCP(t), "a"), newHostOver(t, wire, "b")
	p := connect(t, a.e, b.e)
	tr = transfer(t, p, Write)
	check(t, tr.Add(a.hbm, 0, remote(t, p, "hbm"), 0, 1<<20))
	fill(a.mem, 3)
	run(t, tr) // the chain is warm
	fill(a.mem, 77)
	before = bytes.Clone(b.mem)
	b.dev.keep() // b's device takes its time
	t.Cleanup(b.dev.drop)
	return a, b, k, tr, before
}

// TestChainWithALostAcknowledgement loses what the owner's tcp says of a piece: the sender
// cannot know whether the owner was asked to place it, and must not take it for refused.
func TestChainWithALostAcknowledgement(t *testing.T) {
	for _, reset := range []bool{false, true} {
		t.Run(fmt.Sprintf("reset %v", reset), func(t *testing.T) {
			a, b, k, tr, before := slowPut(t)
			hurry(t, a.e, time.Second)
			k.deaf.Store(true)
			check(t, tr.Post())
			until(t, "the peer has the piece in hand", func() bool { return b.dev.kept() > 0 })
			var err error
			if reset {
				k.cut()
				err = tr.Wait(within(t))
			} else {
				err = tr.Abort(within(t))
			}
			if err == nil || !bytes.Equal(before, b.mem) {
				t.Fatalf("ended with %v", err)
			}
			require.ErrorIs(t, err, ErrUnproven)
			require.ErrorIs(t, tr.Abort(within(t)), ErrUnproven)
		})
	}
}

// TestChainReadAbortedUnanswered has the owner say nothing of a piece that it fetches for the
// reader: memory here is free once Abort has returned, and nothing comes when the owner goes on.
func TestChainReadAbortedUnanswered(t *testing.T) {
	wire, k := tcpBehind(t)
	a, b := newHostOver(t, plainTCP(t), "a"), newHostOver(t, wire, "b")
	p := connect(t, a.e, b.e)
	tr := transfer(t, p, Read)
	check(t, tr.Add(a.hbm, 0, remote(t, p, "hbm"), 0, 1<<20))
	run(t, tr)
	fill(b.mem, 77)
	hurry(t, a.e, time.Second)
	b.dev.keep()
	k.deaf.Store(true)
	check(t, tr.Post())
	until(t, "the peer has the piece in hand", func() bool { return b.dev.kept() > 0 })
	before := bytes.Clone(a.mem)
	require.NoError(t, tr.Abort(within(t)))
	require.ErrorIs(t, tr.Err(), ErrAborted)
	k.deaf.Store(false)
	b.dev.release()
	until(t, "the hop has ended", func() bool { return b.e.slots.posted() == 0 })
	require.Equal(t, before, a.mem)
	check(t, tr.Close())
	check(t, a.hbm.Close())
}

// TestChainsOverABadLine moves between devices and memory of two engines over tcp that delays,
// drops, fails and flaps. What is said to be done is right, and in the end everything is.
func TestChainsOverABadLine(t *testing.T) {
	line, err := fault.Wrap(plainTCP(t), 11,
		fault.Rule{On: fault.Batch, Chance: 0.4, Do: fault.Delay(2*time.Millisecond,
			2*time.Millisecond)},
		fault.Rule{On: fault.Write, Chance: 0.01, Do: fault.Drop()},
		fault.Rule{On: fault.Batch, Chance: 0.01, Do: fault.Fail(driver.ErrPeerLost)},
		fault.Rule{On: fault.Write, Chance: 0.3, Do: fault.Late(time.Millisecond, 0)},
		fault.Rule{On: fault.Batch, Every: 150, Do: fault.Flap(30 * time.Millisecond)})
	require.NoError(t, err)
	a := newHostOver(t, line, "a", func(c *Config) { c.TransferTimeout = 3 * time.Second })
	b := newHostOver(t, plainTCP(t), "b")
	hurry(t, a.e, time.Second)
	once := func(op Op, local *Region, name string) error {
		d, err := b.e.Describe()
		require.NoError(t, err)
		p, err := a.e.Connect(within(t), d)
		if err != nil {
			return err
		}
		defer p.Close()
		tr := transfer(t, p, op)
		if err := tr.Add(local, 0, remote(t, p, name), 0, hostBytes); err != nil {
			return err
		}
		check(t, tr.Post())
		return errors.Join(tr.Wait(within(t)), tr.Abort(within(t)))
	}
	for i, way := range []struct {
		op           Op
		local, there driver.Kind
	}{{Write, driver.HBM, driver.DRAM}, {Read, driver.DRAM, driver.HBM},
		{Write, driver.DRAM, driver.HBM}, {Read, driver.HBM, driver.DRAM},
		{Write, driver.HBM, driver.HBM}} {
		r, near := a.region(way.local)
		there, far := b.region(way.there)
		if way.op == Write {
			fill(near, byte(i))
		} else {
			fill(far, byte(i))
		}
		tries := 1
		for err := once(way.op, r, there.Name()); err != nil; err = once(way.op, r, there.Name()) {
			if tries++; tries > 40 {
				t.Fatalf("%v of %v: in %d tries: %v", way.op, way.there, tries, err)
			}
		}
		require.True(t, bytes.Equal(near, far), "%v of %v: other bytes, and no error", way.op,
			way.there)
	}
	fired := uint64(0)
	for _, n := range line.Fired() {
		fired += n
	}
	require.Greater(t, fired, uint64(20), "the line was not bad")
}

// TestChainAbortedOnTheWay aborts while the bytes are on their way, and has the time to see them
// thrown away: when Abort has returned nil the peer places none of them.
func TestChainAbortedOnTheWay(t *testing.T) {
	_, b, k, tr, before := slowPut(t)
	for range 20 {
		came, goOn := k.hold(t, 256<<10)
		check(t, tr.Post())
		<-came
		aborted := make(chan error, 1)
		go func() { aborted <- tr.Abort(within(t)) }()
		until(t, "the abort is under way", func() bool { return tr.state().has(cancelled) })
		goOn()
		require.NoError(t, <-aborted)
		require.ErrorIs(t, tr.Err(), ErrAborted)
		require.Zero(t, b.dev.kept())
		if !bytes.Equal(before, b.mem) {
			testkit.FatalBroken(t, "bytes landed though the chain was aborted")
		}
	}
}

// TestTimedChainAbortedWithoutTheTime has an AbortGrace in which no link of that rate carries what
// is under way: the connection is closed, Abort says what that proves, and no later post gets by.
func TestTimedChainAbortedWithoutTheTime(t *testing.T) {
	a, b, k, tr, before := slowPut(t)
	hurry(t, a.e, 100*time.Millisecond)
	k.rate.Store(128 << 10)
	for {
		check(t, tr.Post())
		time.Sleep(50 * time.Millisecond)
		err := tr.Abort(within(t))
		require.ErrorIs(t, tr.Err(), ErrAborted)
		if err != nil {
			require.ErrorIs(t, err, ErrUnproven)
			break
		} // else nothing was under way yet, or the last word said that nothing is in hand
		require.Zero(t, b.dev.kept())
		require.True(t, bytes.Equal(before, b.mem))
		if !tr.p.alive(tr.p.e.stager.lane.index) {
			break
		}
	}
	check(t, tr.Post())
	require.ErrorIs(t, tr.Wait(within(t)), ErrPeerLost)
	require.NoError(t, tr.Abort(within(t)), "nothing of this post has left")
}

// TestRevokeOfAllBackends: by the time that one backend looks for its proof, the epoch has ended in
// all, also where that finds none. Where the context is over all epochs end, and nothing more.
func TestRevokeOfAllBackends(t *testing.T) {
	over, cancel := context.WithCancel(context.Background())
	cancel()
	for name, ctx := range map[string]context.Context{"no proof": context.Background(),
		"over": over} {
		t.Run(name, func(t *testing.T) {
			var ended [3]atomic.Bool
			var proof atomic.Bool
			var list []driver.Backend
			for i := range ended {
				onRevoke := func(c context.Context) error {
					ended[i].Store(true)
					switch {
					case proof.Load() || c.Err() == nil && i > 0:
						return nil
					case c.Err() != nil:
						return driver.ContextError(c)
					}
					if !ended[1].Load() || !ended[2].Load() {
						t.Error("the proof is looked for before every epoch has ended")
					}
					return ErrBusy
				}
				list = append(list, &fake{name: fmt.Sprint(i), onRevoke: onRevoke})
			}
			e := open(t, "e", func(c *Config) { c.Backends = list })
			l, err := register(t, e, "r", 4096).Lease(0, 64, LeaseOptions{})
			check(t, err)
			require.Error(t, l.Revoke(ctx))
			for i := range ended {
				require.True(t, ended[i].Load(), "backend %d", i)
			}
			proof.Store(true)
			require.NoError(t, l.Revoke(context.Background()))
		})
	}
}

// lateCloser is a backend whose Peer takes longer to close than AbortGrace.
type lateCloser struct {
	*fake
	closing, end chan struct{}
}

type lateClosing struct {
	*fakePeer
	b *lateCloser
}

func (b *lateCloser) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	p, err := b.fake.Connect(ctx, addr)
	return &lateClosing{p.(*fakePeer), b}, err
}

func (p *lateClosing) Close() error {
	select {
	case p.b.closing <- struct{}{}:
		<-p.b.end
	default:
	}
	return p.fakePeer.Close()
}

// TestAbortWaitsForClose gives a transfer up only when the backend's Close has returned and
// has not ended it: until then the proof may come.
func TestAbortWaitsForClose(t *testing.T) { testkit.InVirtualTime(t, abortWaitsForClose) }

func abortWaitsForClose(t *testing.T) {
	b := &lateCloser{&fake{manual: true}, make(chan struct{}, 1), make(chan struct{})}
	e := open(t, "e", func(c *Config) {
		c.Backends, c.AbortGrace = []driver.Backend{b}, 10*time.Millisecond
	})
	r := register(t, e, "r", 1<<16)
	p, err := e.Self()
	check(t, err)
	tr := transfer(t, p, Write)
	check(t, tr.Add(r, 0, remote(t, p, "r"), 1<<15, 1))
	check(t, tr.Post())
	aborted := make(chan error, 1)
	go func() { aborted <- tr.Abort(context.Background()) }()
	<-b.closing
	select {
	case err := <-aborted:
		t.Fatalf("given up before Close has returned: %v", err)
	case <-time.After(20 * e.cfg.AbortGrace):
	}
	close(b.end)
	require.NoError(t, <-aborted)
	check(t, tr.Close())
	require.NoError(t, r.Close())
}

// TestTimedAbortOverASlowLink ends a write of which most is still on its way: there is a proof, and
// the memory is free.
func TestTimedAbortOverASlowLink(t *testing.T) {
	wire, k := tcpBehind(t)
	over := func(b driver.Backend) func(*Config) {
		return func(c *Config) { c.Backends, c.AbortGrace = []driver.Backend{b}, time.Second }
	}
	a, b := open(t, "a", over(plainTCP(t))), open(t, "b", over(wire))
	src := register(t, a, "src", 32<<20)
	register(t, b, "dst", 32<<20)
	p := connect(t, a, b)
	k.rate.Store(1 << 20)
	tr := transfer(t, p, Write)
	check(t, tr.Add(src, 0, remote(t, p, "dst"), 0, 32<<20))
	check(t, tr.Post())
	time.Sleep(100 * time.Millisecond) // somewhere in the middle
	require.NoError(t, tr.Abort(context.Background()))
	check(t, tr.Close())
	require.NoError(t, src.Close())
}

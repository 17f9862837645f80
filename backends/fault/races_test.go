// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// before runs f once before the wrapped backend is polled.
type before struct {
	driver.Backend
	f func()
}

func (b *before) Poll(done []driver.Completion) (int, error) {
	if f := b.f; f != nil {
		b.f = nil
		f()
	}
	return b.Backend.Poll(done)
}

// TestPollBesideSubmit has the first flight begin after Poll has looked for one.
func TestPollBesideSubmit(t *testing.T) { testkit.InVirtualTime(t, pollBesideSubmit) }

func pollBesideSubmit(t *testing.T) {
	r := newRig(t, Rule{On: Write, Do: Drop()})
	b := r.near.(*Backend)
	var tag uint64
	b.Backend = &before{b.Backend, func() { tag = r.write(0, 8) }}
	r.silent(0)
	r.silent(tag)
	r.peer.Cancel(tag)
	check(t, r.await(tag))
	b.mu.Lock()
	defer b.mu.Unlock()
	require.Empty(t, b.flights)
	require.Zero(t, b.places)
	require.Zero(t, b.held.Load())
}

// TestNothingIsHeldOfTheDead has the peer die after a batch was found sound, before it is held.
func TestNothingIsHeldOfTheDead(t *testing.T) { testkit.InVirtualTime(t, nothingIsHeldOfTheDead) }

func nothingIsHeldOfTheDead(t *testing.T) {
	r := newRig(t, Rule{On: Write, Do: Swallow()})
	b, p := r.near.(*Backend), r.peer.(*peer)
	check(t, r.far.Close())
	require.Eventually(t, func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return p.dead
	}, patience, time.Millisecond)
	for _, v := range []verdict{{ending: swallow}, {ending: drop}} {
		b.mu.Lock()
		f := b.take()
		b.mu.Unlock()
		err := p.carryOut(f, 1, &driver.Batch{Op: driver.Write, Descs: r.desc(0, 8)}, &v)
		require.ErrorIs(t, err, driver.ErrPeerLost)
		f.giveUp()
	}
}

// TestPollIsNotClosedBeforeTheLastCompletion ends the wrapped backend while a flight is in hand.
func TestPollIsNotClosedBeforeTheLastCompletion(t *testing.T) {
	testkit.InVirtualTime(t, pollIsNotClosedBeforeTheLastCompletion)
}

func pollIsNotClosedBeforeTheLastCompletion(t *testing.T) {
	r := newRig(t, Rule{On: Write, Do: Late(time.Hour, 0)})
	b := r.near.(*Backend)
	tag := r.write(0, 8)
	b.mu.Lock()
	f := b.flights[tag]
	f.state = handing
	b.mu.Unlock()
	closed := make(chan error, 1)
	go func() { closed <- r.near.Close() }()
	var done [1]driver.Completion
	require.Eventually(t, func() bool {
		_, err := b.Backend.Poll(done[:])
		return errors.Is(err, driver.ErrClosed)
	}, patience, time.Millisecond)
	n, early := r.near.Poll(done[:])
	b.mu.Lock()
	f.finish(f.why)
	b.handed.Broadcast()
	b.mu.Unlock()
	check(t, <-closed)
	check(t, early)
	require.Zero(t, n)
	require.ErrorIs(t, r.await(tag), driver.ErrClosed)
	_, err := r.near.Poll(done[:])
	require.ErrorIs(t, err, driver.ErrClosed)
}

// next runs f once after the wrapped backend has taken a batch.
type next struct {
	driver.Peer
	f func()
}

func (p *next) Submit(tag uint64, x *driver.Batch) error {
	err := p.Peer.Submit(tag, x)
	if f := p.f; f != nil && err == nil {
		p.f = nil
		f()
	}
	return err
}

// strange is a connection to a backend of which this one knows no memory, as of another process,
// and two of that: the second is read-only.
func (r *rig) strange() (p driver.Peer, keys [2]uint32) {
	r.Helper()
	far, err := openMem()
	check(r, err)
	r.Cleanup(func() { check(r, far.Close()) })
	p = connect(r, r.near, far)
	for i := range keys {
		seg := driver.Segment{Kind: driver.DRAM, Len: 4096, Mem: make([]byte, 4096),
			ReadOnly: i == 1}
		seg.Secret[0] = byte(i + 1)
		m, err := far.Register(seg)
		check(r, err)
		token, err := m.AppendToken(nil)
		check(r, err)
		keys[i], _, err = p.Import(token)
		check(r, err)
	}
	return p, keys
}

// TestABatchIsTheCallersAgain changes one as soon as its completion was polled.
func TestABatchIsTheCallersAgain(t *testing.T) { testkit.InVirtualTime(t, aBatchIsTheCallersAgain) }

func aBatchIsTheCallersAgain(t *testing.T) {
	r := newRig(t, Rule{On: Write, Do: Late(us, 0)})
	p, keys := r.strange()
	x := &driver.Batch{Op: driver.Write,
		Descs: []driver.Desc{{Len: 8, LocalKey: r.local.Key(), RemoteKey: keys[0]}}}
	p.(*peer).Peer = &next{p.(*peer).Peer, func() {
		check(t, r.await(1))
		x.Descs[0].RemoteKey = keys[1]
	}}
	check(t, p.Submit(1, x))
	require.ErrorIs(t, p.Submit(2, x), driver.ErrReadOnly)
}

// TestReadOnlyIsRefused: it is never an outcome, whatever a write waits for.
func TestReadOnlyIsRefused(t *testing.T) { testkit.InVirtualTime(t, readOnlyIsRefused) }

func readOnlyIsRefused(t *testing.T) {
	for _, rules := range [][]Rule{
		{{On: Message, Size: Exactly(0), Do: Late(20*ms, 0)}},
		{{On: Write, Do: Late(5*ms, 0)}, {On: Write, Do: Drop()}},
	} {
		r := newRig(t, rules...)
		p, keys := r.strange()
		check(t, p.Submit(1, &driver.Batch{Op: driver.Write, Tail: driver.NotifyTail}))
		x := &driver.Batch{Op: driver.Write, Tail: driver.NotifyTail,
			Descs: []driver.Desc{{Len: 8, LocalKey: r.local.Key(), RemoteKey: keys[1]}}}
		require.Eventually(t, func() bool {
			r.poll()
			err := p.Submit(2, x)
			if !errors.Is(err, driver.ErrFull) {
				require.ErrorIs(t, err, driver.ErrReadOnly)
			}
			return !errors.Is(err, driver.ErrFull)
		}, patience, time.Millisecond)
	}
}

// meanwhile runs f as a rule has Connect wait.
type meanwhile struct {
	context.Context
	f func()
}

func (c meanwhile) Done() <-chan struct{} { c.f(); return c.Context.Done() }

// TestConnectThatAFlapOvertakes waits by one rule while another has the connection flap.
func TestConnectThatAFlapOvertakes(t *testing.T) {
	r := newRig(t, Rule{On: Connect, Peer: Exactly(1), Do: Delay(us, 0)})
	b := r.near.(*Backend)
	ctx := meanwhile{t.Context(), func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.refused[string(r.far.Addr())] = time.Now().Add(time.Hour)
	}}
	_, err := b.Connect(ctx, r.far.Addr())
	require.ErrorIs(t, err, driver.ErrPeerLost)
}

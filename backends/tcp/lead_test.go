// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/allocs"
	"github.com/sluicehq/sluice/internal/testing/leak"
	"github.com/sluicehq/sluice/internal/testing/manualclock"
)

// led is a peer whose writes are waited for. Its clock stands: no reader comes back by itself.
type led struct {
	t           *testing.T
	clock       *manualclock.Clock
	b           *Backend
	p           *peer
	m           *memory // the owner's
	local, away []byte
	descs       []driver.Desc
	tag         uint64
}

func newLed(t *testing.T) *led {
	t.Helper()
	clock := manualclock.New()
	owner, near := openBy(t, clock, Config{}), openBy(t, clock, Config{})
	far, away := share(t, owner, 4096)
	m, local := share(t, near, 4096)
	x := &led{t: t, clock: clock, b: near, p: dial(t, near, owner.Addr()), m: far, local: local,
		away: away}
	x.descs = []driver.Desc{{Len: 656, LocalKey: m.key, RemoteKey: take(t, x.p, far)}}
	return x
}

func (x *led) submit() uint64 {
	x.t.Helper()
	x.tag++
	require.NoError(x.t, x.p.Submit(x.tag, &driver.Batch{Op: driver.Write, Descs: x.descs}))
	return x.tag
}

// state is what the peer's lead is now.
func (x *led) state() (aside bool, leads uint64, need int) {
	x.p.mu.Lock()
	defer x.p.mu.Unlock()
	return x.p.lead.aside, x.p.lead.leads, x.p.lead.need
}

// untilAside waits for writes until the reader has stepped aside.
func (x *led) untilAside() {
	x.t.Helper()
	for end := time.Now().Add(limit); time.Now().Before(end); {
		tag := x.submit()
		x.p.Help(tag, nil)
		require.NoError(x.t, await(x.t, x.b, tag))
		if aside, _, _ := x.state(); aside {
			return
		}
	}
	x.t.Fatal("the reader never steps aside for who waits")
}

// Who waits for one small batch after the other reads the ends of them.
func TestWhoWaitsReads(t *testing.T) {
	leak.Check(t)
	x := newLed(t)
	x.untilAside()
	_, before, _ := x.state()
	for i := range 200 {
		fill(x.local, byte(i))
		tag := x.submit()
		require.True(t, x.p.Help(tag, nil))
		var done [2]driver.Completion
		n, err := x.b.Poll(done[:])
		if n != 1 || err != nil || done[0].Tag != tag || done[0].Err != nil {
			t.Fatalf("%d completions after Help, %+v, %v", n, done[0], err)
		}
		if x.away[655] != byte(i) {
			t.Fatal("a write has ended, and its bytes are not there")
		}
	}
	_, leads, _ := x.state()
	require.Equal(t, before+200, leads)
}

// A batch that nobody waits for ends all the same, and the reader stays longer.
func TestReaderComesBack(t *testing.T) {
	leak.Check(t)
	x := newLed(t)
	x.untilAside()
	_, _, need := x.state()
	tag, done := x.submit(), make([]driver.Completion, 1)
	x.clock.Advance(watchTime)
	for n := 0; n == 0; { // asleep: a goroutine that polls would read it
		ready, err := x.b.Arm()
		if err != nil || !ready && x.b.event.Wait() != nil {
			t.Fatal("the backend is closed")
		}
		n, _ = x.b.Poll(done)
	}
	if done[0].Tag != tag || done[0].Err != nil {
		t.Fatalf("got %+v, want tag %d", done[0], tag)
	}
	if aside, _, now := x.state(); aside || now != 2*need {
		t.Errorf("after a batch that nobody waited for the reader stands aside: %t, and does so "+
			"again after %d, want %d", aside, now, 2*need)
	}
	x.untilAside()
}

// Whoever reads for a batch that does not end leaves when told to, and when the peer is closed.
func TestWhoReadsLeaves(t *testing.T) {
	leak.Check(t)
	for name, end := range map[string]func(*led, chan struct{}){
		"told to stop":    func(_ *led, stop chan struct{}) { close(stop) },
		"the peer closed": func(x *led, _ chan struct{}) { _ = x.p.Close() },
	} {
		x := newLed(t)
		x.untilAside()
		x.m.gate.Lock() // nothing lands
		tag, stop, left := x.submit(), make(chan struct{}), make(chan struct{})
		go func() { x.p.Help(tag, stop); close(left) }()
		run := x.clock.Run(time.Millisecond)
		end(x, stop)
		select {
		case <-left:
		case <-time.After(limit):
			t.Errorf("%s: who reads does not leave", name)
		}
		x.m.gate.Unlock()
		run()
		if err := await(t, x.b, tag); err != nil && name == "told to stop" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Many wait at once, and poll if they are told to; one sleeps for all others. Nobody is forgotten,
// and each tag ends once.
func TestManyWaitAtOnce(t *testing.T) {
	leak.Check(t)
	x := newLed(t)
	defer x.clock.Run(time.Millisecond)()
	const goroutines, each = 4, 400
	ends := make([]chan struct{}, goroutines*each)
	for i := range ends {
		ends[i] = make(chan struct{})
	}
	var pollMu sync.Mutex
	poll := func() {
		pollMu.Lock()
		defer pollMu.Unlock()
		var done [8]driver.Completion
		for {
			n, _ := x.b.Poll(done[:])
			for _, c := range done[:n] {
				if c.Err != nil {
					t.Errorf("tag %d: %v", c.Tag, c.Err)
				}
				close(ends[c.Tag]) // twice panics
			}
			if n == 0 {
				return
			}
		}
	}
	var sleeper, waiters sync.WaitGroup
	sleeper.Go(func() {
		for {
			poll()
			ready, err := x.b.Arm()
			if err != nil || !ready && x.b.event.Wait() != nil {
				return
			}
		}
	})
	for g := range goroutines {
		waiters.Go(func() {
			for i := range each {
				tag := uint64(g*each + i)
				if err := x.p.Submit(tag, &driver.Batch{Op: driver.Write,
					Descs: x.descs}); err != nil {
					t.Error(err)
					return
				}
				if (g > 0 || i%64 > 32) && x.p.Help(tag, nil) {
					poll()
				}
				select {
				case <-ends[tag]:
				case <-time.After(limit):
					t.Errorf("tag %d does not end", tag)
					return
				}
				if i%32 == 0 {
					time.Sleep(time.Millisecond) // some wait alone
				}
			}
		})
	}
	waiters.Wait()
	_ = x.b.Close()
	sleeper.Wait()
}

// No allocation from Submit to the completion, whoever reads.
func TestHelpAllocatesNothing(t *testing.T) {
	x := newLed(t)
	x.untilAside()
	var done [1]driver.Completion
	each := allocs.PerRun(500, func() {
		tag := x.submit()
		x.p.Help(tag, nil)
		for {
			if n, _ := x.b.Poll(done[:]); n == 1 {
				return
			}
			time.Sleep(10 * time.Microsecond)
		}
	})
	if each >= 1 {
		t.Errorf("%v allocations for a batch that is waited for", each)
	}
}

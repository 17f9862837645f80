// SPDX-License-Identifier: Apache-2.0

package ucx_test

import (
	"errors"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/ucx"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/leak"
	"github.com/sluicehq/sluice/internal/testing/netns"
	"github.com/sluicehq/sluice/internal/testing/promise"
)

// shortGrace makes the tests of failure quick; slack is what a machine with more to
// do may add to what is promised, beside the time for which it does not let us run.
const (
	shortGrace = time.Second
	slack      = 1500 * time.Millisecond
)

// messageBytes is how many bytes a message carries. An owner that is frozen while it copies one out
// of UCX's buffer into its memory is in the middle of a few instructions of its own, and ends them
// when it goes on, before it looks at anything else: one message on its connection, and no more.
const messageBytes = 60 << 10

// stage is two sides that are connected both ways.
type stage struct {
	t      *testing.T
	config sideConfig
	near   *side
	far    *child
	lease  []byte // of the far side's kv, granted before anything failed
	lag    lag
}

// lag watches for how long the machine does not let a process run that would.
type lag struct {
	mu   sync.Mutex
	late []pause
}

type pause struct{ at, took time.Duration }

// watch runs until the test ends.
func (l *lag) watch(t *testing.T) {
	over, ended := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() { close(over); <-ended })
	go func() {
		defer close(ended)
		const step = 5 * time.Millisecond
		for {
			begin := uptime()
			select {
			case <-over:
				return
			case <-time.After(step):
			}
			now := uptime()
			l.mu.Lock()
			l.late = append(l.late, pause{now, now - begin - step})
			l.mu.Unlock()
		}
	}()
}

func (l *lag) within(since, at time.Duration) (sum time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range l.late {
		if p.at >= since && p.at-p.took <= at {
			sum += p.took
		}
	}
	return sum
}

func newStage(t *testing.T, c sideConfig, start func(*exec.Cmd) error) *stage {
	t.Helper()
	c.Name = "near"
	near, err := newSide(c)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	t.Cleanup(func() {
		begin := time.Now()
		if err := near.close(); err != nil {
			t.Errorf("close: %v", err)
		}
		t.Logf("everything closed after %v", time.Since(begin))
	})
	s := &stage{t: t, config: c, near: near}
	s.lag.watch(t)
	s.begin(start)
	return s
}

// begin starts a far side.
func (s *stage) begin(start func(*exec.Cmd) error) {
	s.t.Helper()
	s.config.Name = "far"
	s.far = startChild(s.t, s.config, start)
	s.lease = s.far.do(order{Do: "grant"}).Token
}

// connect joins the sides, again and again until that succeeds or too long has
// passed: what lies between them may need a moment.
func (s *stage) connect() {
	s.t.Helper()
	there := s.far.do(order{Do: "describe"})
	s.far.where = there.Where
	here, err := s.near.e.Describe()
	require.NoError(s.t, err)
	for end := time.Now().Add(limit); ; time.Sleep(20 * time.Millisecond) {
		err := s.near.connect(there.Data)
		if err == nil {
			break
		}
		if time.Now().After(end) {
			s.t.Fatalf("connect: %v", err)
		}
	}
	s.far.do(order{Do: "connect", Data: here})
}

// run makes both sides write to each other and read from each other. Ours write by
// the lease that was granted at the beginning, theirs by one of now.
//
// Where the machine stands still for Failure one side takes the other for lost: then they connect
// and begin anew.
func (s *stage) run() (theirs *engine.Lease) {
	s.t.Helper()
	for end := time.Now().Add(2 * limit); ; {
		token, err := s.near.grant()
		require.NoError(s.t, err)
		if err = s.near.start(s.lease); err == nil {
			_, err = s.far.try(order{Do: "start", Data: token})
		}
		if err == nil {
			break
		}
		if !strings.Contains(err.Error(), engine.ErrPeerLost.Error()) || time.Now().After(end) {
			s.t.Fatalf("start: %v", err)
		}
		s.t.Logf("once more, since a side was too slow: %v", err)
		s.revoke(s.near.lease)
		if err := s.near.peer.Close(); err != nil {
			s.t.Error(err)
		}
		s.ended()
		s.far.do(order{Do: "hangUp"})
		s.far.do(order{Do: "outcome"})
		s.connect()
	}
	time.Sleep(30 * time.Millisecond) // both are in the middle of it
	return s.near.lease
}

// ended waits until nothing of ours moves, and returns when that was.
func (s *stage) ended() time.Duration {
	s.t.Helper()
	at, err := s.near.flood.outcome()
	if err != nil {
		s.t.Errorf("outcome: %v", err)
	}
	return at
}

// revoke ends a lease of ours.
func (s *stage) revoke(l *engine.Lease) {
	s.t.Helper()
	if err := l.Revoke(s.t.Context()); err != nil {
		s.t.Errorf("revoke: %v", err)
	}
}

// poison fills what nothing may land in any more, on both sides.
func (s *stage) poison(near, far int) {
	s.t.Helper()
	s.near.poison(near)
	s.far.do(order{Do: "poison", What: far})
}

// untouched fails the test if something lands there all the same.
func (s *stage) untouched(near, far int, d time.Duration) {
	s.t.Helper()
	seen := make(chan error, 1)
	go func() { seen <- s.near.watch(near, d, 0) }()
	_, err := s.far.try(order{Do: "watch", What: far, For: d, But: messageBytes})
	s.late("far", err)
	s.late("near", <-seen)
}

// late tells what watch has seen on a side.
func (s *stage) late(side string, err error) {
	s.t.Helper()
	switch {
	case err == nil:
	case strings.Contains(err.Error(), landedText):
		promise.Breaks(s.t, "the %s side, when it was over: %v", side, err)
	default:
		s.t.Errorf("the %s side, when it was over: %v", side, err)
	}
}

// part closes the connections, while all is well or when all is over.
func (s *stage) part(promised time.Duration) {
	s.t.Helper()
	begin := uptime()
	if err := s.near.peer.Close(); err != nil {
		s.t.Error(err)
	}
	s.soon("the near side's peer closed", begin, uptime(), promised)
	s.ended()
	begin = uptime()
	s.soon("the far side's peer closed", begin, s.far.do(order{Do: "hangUp"}).At, promised)
	s.far.do(order{Do: "outcome"})
}

// soon fails the test if something took too long.
func (s *stage) soon(what string, since, at, promised time.Duration) {
	s.t.Helper()
	took := at - since
	s.t.Logf("%s after %v, promised within %v", what, took.Round(time.Millisecond), promised)
	// Each step of one process waits for another, which may have to wait as long as we do.
	if took > promised+slack+2*s.lag.within(since, at) {
		s.t.Errorf("%s after %v, promised within %v", what, took, promised)
	}
}

func unplug(far *netns.Host) error { return far.Plug(false) }
func plug(far *netns.Host) error   { return far.Plug(true) }

// misroute sends what the far host sends to a station that is none, so that only its
// own packets are lost: it goes on to hear the near one.
func misroute(far *netns.Host, on bool) error {
	args := []string{"neigh", "del", "192.0.2.1", "dev", "cable0"}
	if on {
		args = []string{"neigh", "replace", "192.0.2.1", "lladdr", "02:00:00:00:00:99", "nud",
			"permanent", "dev", "cable0"}
	}
	ip := exec.Command("ip", args...)
	return errors.Join(far.Do(ip.Start), ip.Wait())
}

// TestTimedCable interrupts what is between two hosts while both move bytes. Both learn
// of it in time, nothing lands when the way is open again, and then all goes on.
func TestTimedCable(t *testing.T) { interrupted(t, unplug, plug) }

// TestSoakPacketsAstray does so to the packets of one of them alone.
func TestSoakPacketsAstray(t *testing.T) {
	interrupted(t, func(far *netns.Host) error { return misroute(far, true) },
		func(far *netns.Host) error { return misroute(far, false) })
}

func interrupted(t *testing.T, fail, mend func(far *netns.Host) error) {
	t.Helper()
	host := betweenHosts(t)
	if host == nil {
		return
	}
	leak.Check(t)
	s := newStage(t, sideConfig{UCX: ucx.Config{Grace: shortGrace, Failure: shortGrace}},
		host.Start)
	for _, round := range []struct {
		name string
		run  func(*stage, func() error)
	}{{"both find out", lostRound}, {"one finds out", earlyRound}, {"closed before", closedRound}} {
		s.connect()
		lease := s.run()
		t.Log(round.name)
		require.NoError(t, fail(host))
		round.run(s, func() error { return mend(host) })
		s.revoke(lease)
	}
	s.connect() // and it works once more
	s.revoke(s.run())
	s.part(shortGrace)
}

// lostRound waits until both sides have found out by themselves.
func lostRound(s *stage, mend func() error) {
	s.t.Helper()
	begin := uptime()
	s.soon("the near side's transfers ended", begin, s.ended(), 2*shortGrace)
	s.soon("the far side's transfers ended", begin, s.far.do(order{Do: "outcome"}).At, 2*shortGrace)
	s.poison(inAll, inAll)
	require.NoError(s.t, mend())
	s.untouched(inAll, inAll, 1500*time.Millisecond)
	s.part(shortGrace)
}

// earlyRound opens the way again as soon as the near side has found out: what of its
// transfers is on the way still finds the far side's memory, and must not land there.
func earlyRound(s *stage, mend func() error) {
	s.t.Helper()
	begin := uptime()
	s.soon("the near side's transfers ended", begin, s.ended(), 2*shortGrace)
	s.poison(inSrc, inKV)
	require.NoError(s.t, mend())
	s.untouched(inSrc, inKV, time.Second)
	s.part(3 * shortGrace)
}

// closedRound does not wait: it closes the connections as long as nobody knows. That
// may take the grace for what moves, for the goodbye, and for the endpoint.
func closedRound(s *stage, mend func() error) {
	s.t.Helper()
	s.part(3 * shortGrace)
	s.poison(inAll, inAll)
	require.NoError(s.t, mend())
	s.untouched(inAll, inAll, 1500*time.Millisecond)
}

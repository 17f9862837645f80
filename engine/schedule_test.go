// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// scheduled is an engine with a schedule over a fake that ends batches when the test says so. A
// batch has one piece of at most 8 bytes, and the room of a resource is 16 bytes.
type scheduled struct {
	t *testing.T
	f *fake
	e *Engine
	p *Peer
	r *Region
	m *Remote

	mu    sync.Mutex
	order []int // slots of the batches that the backend was given
}

func newScheduled(t *testing.T, change ...func(*Config)) *scheduled {
	t.Helper()
	s := &scheduled{t: t, f: &fake{manual: true}}
	s.f.onSubmit = func(_ int, _ driver.Op, tag uint64, _ bool) error {
		slot, _, _ := untag(tag)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.order = append(s.order, slot)
		return nil
	}
	s.e = open(t, "e", append(change, func(c *Config) {
		c.Backends = []driver.Backend{s.f}
		if c.Schedule == nil {
			c.Schedule = &Schedule{BytesInFlight: 16, PieceBytes: 8}
		}
	})...)
	other := open(t, "other", func(c *Config) { c.Backends = []driver.Backend{&fake{}} })
	register(t, other, "r", 1<<16)
	s.p, s.r = connect(t, s.e, other), register(t, s.e, "local", 1<<16)
	s.m = remote(t, s.p, "r")
	time.Sleep(time.Second) // in virtual time it is the moment of Open otherwise
	return s
}

// make makes a transfer of a class and some pieces.
func (s *scheduled) make(class Class, deadline time.Time, pieces int) *Transfer {
	s.t.Helper()
	t := transfer(s.t, s.p, Write)
	check(s.t, t.Schedule(class, deadline))
	check(s.t, t.Add(s.r, 0, s.m, 0, uint64(pieces)*8))
	return t
}

func (s *scheduled) post(class Class, deadline time.Time, pieces int) *Transfer {
	s.t.Helper()
	t := s.make(class, deadline, pieces)
	check(s.t, t.Post())
	return t
}

// submitted returns, once nothing happens any more, which transfers the backend was given batches
// of since the last call.
func (s *scheduled) submitted(of ...*Transfer) (list []int) {
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, slot := range s.order {
		for i, t := range of {
			if t.slot == slot {
				list = append(list, i)
			}
		}
	}
	s.order = nil
	return list
}

// end ends the oldest batch.
func (s *scheduled) end() {
	s.t.Helper()
	synctest.Wait()
	require.True(s.t, s.f.finishOne(nil), "the backend has no batch")
	synctest.Wait()
}

// endAll ends batches as they come until none is left.
func (s *scheduled) endAll() {
	for synctest.Wait(); s.f.finishOne(nil); synctest.Wait() {
	}
}

// alone checks that nothing is left in the books of the schedule.
func (s *scheduled) alone() {
	s.t.Helper()
	synctest.Wait()
	c := s.e.schedule
	c.mu.Lock()
	defer c.mu.Unlock()
	require.Empty(s.t, c.blocked)
	require.Zero(s.t, c.waiting.Load())
	for _, conn := range s.p.conns {
		if conn != nil {
			r := conn.resource
			require.Zero(s.t, r.inFlight+uint64(r.posts+r.queued), r.name)
			require.Zero(s.t, r.swapIns.Load(), r.name)
		}
	}
}

// inVirtualTime runs a test over a scheduled.
func inVirtualTime(t *testing.T, do func(t *testing.T, s *scheduled), change ...func(*Config)) {
	t.Helper()
	testkit.InVirtualTime(t, func(t *testing.T) { do(t, newScheduled(t, change...)) })
}

var never time.Time

// TestSwapInsComeFirst: while one is under way, no piece of a lower class is handed over; what is
// with the backend stays, and the swap-in does not wait for it.
func TestSwapInsComeFirst(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		flood := s.post(SwapOut, never, 6)
		require.Equal(t, []int{0, 0}, s.submitted(flood), "as much as there is room for")
		first, second := s.post(SwapIn, never, 1), s.post(SwapIn, never, 1)
		require.Equal(t, []int{1, 2}, s.submitted(flood, first, second))
		s.end()
		s.end() // those of the flood
		s.end()
		require.Empty(t, s.submitted(flood), "a swap-in is still under way")
		s.end()
		check(t, second.Wait(within(t)))
		require.Equal(t, []int{0, 0}, s.submitted(flood))
		s.endAll()
		check(t, flood.Wait(within(t)))
		s.alone()
	})
}

// TestASwapInThatStandsStillHoldsNothingBack: a peer that is frozen must not end the service of the
// others.
func TestASwapInThatStandsStillHoldsNothingBack(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		stuck := transfer(t, s.p, Write)
		scattered(t, stuck, s.r, s.m, 2)
		check(t, stuck.Post())
		flood := s.post(SwapOut, never, 1)
		require.Empty(t, s.submitted(flood))
		time.Sleep(patienceDefault * 3 / 4)
		s.end()
		time.Sleep(patienceDefault * 3 / 4)
		require.Empty(t, s.submitted(flood), "it has made progress since")
		time.Sleep(patienceDefault / 2)
		require.Equal(t, []int{0}, s.submitted(flood))
		s.endAll()
		check(t, stuck.Wait(within(t)))
		check(t, flood.Wait(within(t)))
		s.alone()
	})
}

// TestOneSwapInThatStandsStillBesideOthers that take no time holds nothing back either.
func TestOneSwapInThatStandsStillBesideOthers(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		stuck, low := s.post(SwapIn, never, 1), s.post(SwapOut, never, 1)
		require.Equal(t, []int{0}, s.submitted(stuck, low))
		s.f.mu.Lock()
		first := s.f.tags[0]
		s.f.mu.Unlock()
		for range 3 {
			x := s.post(SwapIn, never, 1)
			s.f.mu.Lock()
			last := s.f.tags[len(s.f.tags)-1]
			s.f.mu.Unlock()
			require.NotEqual(t, first, last)
			s.f.drop(last, nil)
			check(t, x.Wait(within(t)))
			time.Sleep(patienceDefault / 2)
		}
		require.Equal(t, []int{1}, s.submitted(stuck, low))
		s.endAll()
		check(t, stuck.Wait(within(t)))
		s.alone()
	})
}

// TestPromote: what somebody waits for now goes before what is queued, also beside a swap-in and
// where there is no room, and holds it back; behind its end it holds nothing back.
func TestPromote(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		flood := s.post(SwapOut, never, 6)
		require.Equal(t, []int{0, 0}, s.submitted(flood))
		fetch, other := s.post(Prefetch, never, 2), s.post(Prefetch, never, 1)
		swapIn := s.post(SwapIn, never, 1)
		require.Equal(t, []int{3}, s.submitted(flood, fetch, other, swapIn))
		fetch.Promote()
		fetch.Promote()
		require.Equal(t, []int{1, 1}, s.submitted(flood, fetch, other))
		s.end()
		s.end() // those of the flood
		s.end()
		check(t, swapIn.Wait(within(t)))
		s.end()
		require.Empty(t, s.submitted(flood, fetch, other), "it is still under way")
		s.end()
		check(t, fetch.Wait(within(t)))
		require.Equal(t, []int{2, 0}, s.submitted(flood, fetch, other))
		check(t, fetch.Post())
		require.Empty(t, s.submitted(fetch), "another post is none of it")
		s.endAll()
		check(t, fetch.Wait(within(t)))
		fetch.Promote()
		s.alone()

		begun := s.post(Prefetch, never, 2)
		begun.Promote()
		require.Empty(t, s.submitted(s.post(SwapOut, never, 1)), "it was not queued")
		s.endAll()
		s.alone()
	})
}

// TestWeights: with all three classes waiting, each gets pieces by its weight.
func TestWeights(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		var all []*Transfer
		for c := Prefetch; c < classes; c++ {
			all = append(all, s.post(c, never, 100))
		}
		s.submitted() // the first has come alone
		counts := [3]int{}
		for range 84 {
			s.end()
			for _, i := range s.submitted(all...) {
				counts[i]++
			}
		}
		for i, want := range []int{64, 16, 4} {
			require.InDelta(t, want, counts[i], 2, "class %v", Class(i+1))
		}
		s.endAll()
		s.alone()
	})
}

// TestAnIdleClassSavesNothingUp: one that comes after another has had the resource alone gets its
// share from then on, and no more.
func TestAnIdleClassSavesNothingUp(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		old := s.post(SwapOut, never, 100)
		for range 50 {
			s.end()
		}
		s.submitted()
		late := s.post(Replicate, never, 100)
		counts := [2]int{}
		for range 25 {
			s.end()
			for _, i := range s.submitted(old, late) {
				counts[i]++
			}
		}
		require.InDelta(t, 20, counts[0], 2)
		s.endAll()
		s.alone()
	})
}

// TestPiecesTellOfTheirTransfer: each batch of a list that is cut has the bytes of all.
func TestPiecesTellOfTheirTransfer(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		x := s.post(SwapOut, never, 3)
		s.endAll()
		check(t, x.Wait(within(t)))
		require.Len(t, x.batches, 3)
		for _, b := range x.batches {
			require.EqualValues(t, 24, b.Total)
		}
	})
}

// TestWithinAClassTheFirstGoesFirst, and goes on before others begin.
func TestWithinAClassTheFirstGoesFirst(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		a, b, c := s.post(SwapOut, never, 4), s.post(SwapOut, never, 2), s.post(SwapOut, never, 1)
		s.endAll()
		require.Equal(t, []int{0, 0, 0, 0, 1, 1, 2}, s.submitted(a, b, c))
		s.alone()
	})
}

// TestSmallPiecesDoNotOvertakeLargeOnes for which there is no room yet.
func TestSmallPiecesDoNotOvertakeLargeOnes(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		small := func() *Transfer {
			x := transfer(t, s.p, Write)
			check(t, x.Schedule(SwapOut, never))
			check(t, x.Add(s.r, 0, s.m, 0, 4))
			check(t, x.Post())
			return x
		}
		list := []*Transfer{s.post(SwapOut, never, 1), small(), s.post(SwapOut, never, 1), small()}
		require.Equal(t, []int{0, 1}, s.submitted(list...))
		s.end()
		require.Equal(t, []int{2, 3}, s.submitted(list...))
		s.endAll()
		s.alone()
	})
}

// TestWhatAnotherLaneEnded: what one backend's end lets go to another one may be done in Submit, of
// which no wake-up comes.
func TestWhatAnotherLaneEnded(t *testing.T) {
	testkit.InVirtualTime(t, func(t *testing.T) {
		first, second := &fake{name: "first", manual: true}, &fake{name: "second", sleep: true}
		e := open(t, "e", over(first, second), func(c *Config) {
			c.Schedule = &Schedule{BytesInFlight: 8, PieceBytes: 8}
		})
		p, err := e.Self()
		check(t, err)
		r := register(t, e, "r", 1<<16)
		r.file = e.schedule.newResource("file", new(atomic.Int64))
		post := func(by string) *Transfer {
			x, err := e.NewTransfer(p, Write, Route{Only: by})
			check(t, err)
			check(t, x.Schedule(SwapOut, never))
			check(t, x.Add(r, 0, remote(t, p, "r"), 1<<15, 8))
			check(t, x.Post())
			return x
		}
		a, b := post("first"), post("second")
		ended := make(chan error, 1)
		go func() { ended <- b.Wait(within(t)) }()
		synctest.Wait()
		require.True(t, first.finishOne(nil))
		check(t, <-ended)
		check(t, a.Wait(within(t)))
	})
}

// TestDeadlineInTheQueue: what has not begun by then ends with ErrExpired, at that time, and
// nothing of it was handed over; what has begun goes on.
func TestDeadlineInTheQueue(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		in := func(d time.Duration) time.Time { return time.Now().Add(d) }
		begun := s.post(SwapOut, in(time.Second), 3)
		require.Equal(t, []int{0, 0}, s.submitted(begun))
		queued := s.post(SwapOut, in(2*time.Second), 3)
		last := s.post(Prefetch, in(3*time.Second), 1)
		late := s.post(SwapIn, in(-time.Second), 1)
		for _, x := range []*Transfer{late, queued, last} {
			err := x.Wait(within(t))
			require.ErrorIs(t, err, ErrExpired)
			require.ErrorIs(t, err, ErrTimeout)
			require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		}
		require.WithinDuration(t, in(0), s.e.born.Add(time.Duration(last.expires.Load())),
			time.Millisecond)
		require.Empty(t, s.submitted(begun, queued, last, late))
		s.endAll()
		check(t, begun.Wait(within(t)))
		counts := s.e.Stats().Classes
		require.EqualValues(t, []uint64{1, 1, 1}, []uint64{counts[SwapIn].Expired,
			counts[Prefetch].Expired, counts[SwapOut].Expired})
		require.Equal(t, 5*time.Second, counts[SwapOut].Waited.Truncate(time.Second))
		check(t, queued.Schedule(SwapOut, never)) // it may be posted again, with another deadline
		check(t, queued.Post())
		s.endAll()
		check(t, queued.Wait(within(t)))
		s.alone()
	})
}

// TestDeadlineInABacklog: it ends what waits for room at a connection, or for the right to send a
// long notification, too.
func TestDeadlineInABacklog(t *testing.T) {
	for _, class := range []Class{SwapIn, SwapOut} {
		testkit.RunInVirtualTime(t, class.String(), func(t *testing.T) {
			s := newScheduled(t)
			s.f.room = 1
			before := s.post(SwapOut, never, 1)
			s.submitted()
			begin := time.Now()
			x := s.post(class, begin.Add(time.Second), 1)
			require.ErrorIs(t, x.Wait(within(t)), ErrExpired)
			require.WithinDuration(t, begin.Add(time.Second), time.Now(), 10*time.Millisecond)
			s.endAll()
			check(t, before.Wait(within(t)))

			submit := s.f.onSubmit // tick comes while the backend is about to say that it is full
			s.f.room, s.f.onSubmit = 0, func(int, driver.Op, uint64, bool) error {
				s.e.schedule.timer.Stop()
				s.e.schedule.tick()
				return ErrFull
			}
			x = s.post(class, time.Now().Add(time.Second), 1)
			require.ErrorIs(t, x.Wait(within(t)), ErrExpired)
			s.f.onSubmit = submit

			for range 2 { // a message alone, and one behind a hello
				s.f.room = 1
				x = transfer(t, s.p, Write)
				check(t, x.Schedule(class, time.Now().Add(time.Second)))
				check(t, x.Notify([]byte("m")))
				before = s.post(SwapOut, never, 1)
				s.submitted()
				check(t, x.Post())
				require.ErrorIs(t, x.Wait(within(t)), ErrExpired)
				s.endAll()
				check(t, before.Wait(within(t)))
				s.p.conns[0].greeted.Store(false)
			}
			s.f.room = 0
			s.p.conns[0].greeted.Store(true)
			long := func(class Class, deadline time.Time) *Transfer {
				x := s.make(class, deadline, 1)
				check(t, x.Notify(make([]byte, 2*messageMin)))
				check(t, x.Post())
				synctest.Wait()
				return x
			}
			before = long(SwapOut, never)
			begin = time.Now()
			require.ErrorIs(t, long(class, begin.Add(time.Second)).Wait(within(t)), ErrExpired)
			require.WithinDuration(t, begin.Add(time.Second), time.Now(), 10*time.Millisecond)
			s.endAll()
			check(t, before.Wait(within(t)))
			s.alone()
		})
	}
}

// TestNothingQueuedIsLate: a transfer past its deadline is not begun, also where room comes before
// the timer.
func TestNothingQueuedIsLate(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		first := s.post(SwapOut, never, 2)
		late := s.post(SwapOut, time.Now().Add(time.Hour), 1)
		s.submitted()
		late.expires.Store(int64(s.e.now())) // and the timer does not know
		s.end()
		require.ErrorIs(t, late.Wait(within(t)), ErrExpired)
		s.endAll()
		check(t, first.Wait(within(t)))
		require.Empty(t, s.submitted(late))
		s.alone()
	})
}

// TestAbortInTheQueue ends a post at once, with nothing handed over; one that has begun hands over
// no more.
func TestAbortInTheQueue(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		begun, queued := s.post(SwapOut, never, 4), s.post(SwapOut, never, 1)
		s.f.onCancel = func(tag uint64) { s.f.drop(tag, driver.ErrAborted) }
		check(t, queued.Abort(within(t)))
		require.ErrorIs(t, queued.Err(), ErrAborted)
		require.Equal(t, []int{0, 0}, s.submitted(begun, queued))
		check(t, begun.Abort(within(t)))
		require.ErrorIs(t, begun.Err(), ErrAborted)
		require.Empty(t, s.submitted(begun, queued))
		s.alone()
	})
}

// TestAbortBesideTheQueue: an Abort that looks into the queue just before the post gets there
// leaves it to the submitter to end the post.
func TestAbortBesideTheQueue(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		first, x := s.post(SwapIn, never, 1), s.post(SwapOut, never, 1)
		c := s.e.schedule
		require.True(t, c.remove(x)) // the test is its submitter
		x.stop(x.state().generation(), ErrAborted)
		require.True(t, x.state().underWay())
		require.Equal(t, ended, c.request(x, x.state().generation()),
			"no other goroutine will look")
		x.submit(nil)
		require.ErrorIs(t, x.Wait(within(t)), ErrAborted)
		s.endAll()
		check(t, first.Wait(within(t)))
		s.alone()
	})
}

// TestTimeoutInTheQueue: nothing waits for longer than TransferTimeout, whatever is before it.
func TestTimeoutInTheQueue(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		before := s.post(SwapIn, never, 1)
		queued := s.post(SwapOut, never, 1)
		for end := time.Now().Add(3 * limit); queued.state().underWay() &&
			time.Now().Before(end); {
			x := s.post(SwapIn, never, 1) // there is always one
			time.Sleep(patienceDefault / 2)
			s.end()
			check(t, before.Wait(within(t)))
			check(t, before.Close())
			before = x
		}
		require.ErrorIs(t, queued.Wait(within(t)), ErrTimeout)
		require.NotErrorIs(t, queued.Err(), ErrExpired)
		require.Empty(t, s.submitted(queued))
		s.endAll()
		s.alone()
	})
}

// TestLostPeerEndsItsQueue, with the loss as the outcome; and Close ends one, too.
func TestLostPeerEndsItsQueue(t *testing.T) {
	for name, lose := range map[string]func(s *scheduled){
		"lost":         func(s *scheduled) { s.p.conns[0].p.(*fakePeer).lose() },
		"closed":       func(s *scheduled) { check(s.t, s.p.Close()) },
		"engine close": func(s *scheduled) { check(s.t, s.e.Close()) },
	} {
		testkit.RunInVirtualTime(t, name, func(t *testing.T) {
			s := newScheduled(t)
			list := []*Transfer{s.post(SwapOut, never, 2)}
			s.submitted()
			for range 50 {
				list = append(list, s.post(Prefetch, never, 3), s.post(Replicate, never, 1))
			}
			begin := time.Now()
			lose(s)
			for _, x := range list[1:] {
				err := x.Wait(within(t))
				require.Equal(t, name == "lost", errors.Is(err, ErrPeerLost), "%v", err)
				require.Equal(t, name != "lost", errors.Is(err, ErrClosed), "%v", err)
			}
			require.Less(t, time.Since(begin), patienceDefault) // Close may nap a millisecond
			require.Empty(t, s.submitted(list...))
			s.endAll()
			s.alone()
		})
	}
}

// TestNothingIsHandedOverByAConnectionThatIsClosed, from the moment that the engine gives it up:
// its backend takes batches until its Close has returned.
func TestNothingIsHandedOverByAConnectionThatIsClosed(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		hurry(t, s.e, 30*time.Millisecond)
		closing := make(chan struct{})
		closed := sync.OnceFunc(func() { close(closing) })
		defer closed()
		s.f.onClose = func() error { <-closing; return nil }
		late := s.make(Prefetch, never, 2)
		swapIn := s.post(SwapIn, never, 1)
		var list []*Transfer
		for range 50 {
			list = append(list, s.post(SwapOut, never, 3))
		}
		swapIn.stop(swapIn.state().generation(), ErrAborted) // the fake cancels nothing
		for _, x := range list {
			require.ErrorIs(t, x.Wait(within(t)), ErrPeerLost)
		}
		check(t, late.Post())
		require.ErrorIs(t, late.Wait(within(t)), ErrPeerLost)
		require.Empty(t, s.submitted(append(list, late)...))
		closed()
		require.Error(t, swapIn.Wait(within(t)))
		s.alone()
	})
}

// TestALongNotificationWaitsForNoQueue: what is queued has no right to send one, and a swap-in gets
// it before all that wait for it.
func TestALongNotificationWaitsForNoQueue(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		make := func(class Class) *Transfer {
			x := s.make(class, never, 1)
			check(t, x.Notify(make([]byte, 2*messageMin)))
			return x
		}
		list := []*Transfer{s.post(SwapIn, never, 1), make(Replicate), make(SwapIn)}
		check(t, list[1].Post())
		synctest.Wait()
		check(t, list[2].Post())
		require.Equal(t, []int{0, 2, 2, 2}, s.submitted(list...))
		s.endAll()
		for _, x := range list {
			check(t, x.Wait(within(t)))
		}

		list = []*Transfer{make(SwapOut), make(SwapOut), make(SwapIn), make(SwapIn)}
		for _, x := range list {
			check(t, x.Post())
			synctest.Wait()
		}
		s.endAll()
		var order []int
		for _, i := range s.submitted(list...) {
			if len(order) == 0 || order[len(order)-1] != i {
				order = append(order, i)
			}
		}
		require.Equal(t, []int{0, 2, 3, 1}, order)
		s.alone()
	})
}

// TestNoCallerCopiesTheQueue: a goroutine that finds the end of a swap-in submits nothing of what
// waited behind it.
func TestNoCallerCopiesTheQueue(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		swapIn := s.post(SwapIn, never, 1)
		low := s.post(SwapOut, never, 10)
		require.Empty(t, s.submitted(low))
		copying, before := make(chan struct{}), s.f.onSubmit
		s.f.onSubmit = func(n int, op driver.Op, tag uint64, notify bool) error {
			<-copying // Submit of a backend that copies there, and takes its time
			return before(n, op, tag, notify)
		}
		s.f.mu.Lock()
		s.f.manual = false // wakes nobody
		s.f.finish(nil)
		s.f.mu.Unlock()
		require.True(t, swapIn.Done())
		x := s.make(SwapOut, never, 1)
		check(t, x.Post()) // nor does one that posts
		close(copying)
		check(t, low.Wait(within(t)))
		check(t, x.Wait(within(t)))
		s.alone()
	})
}

// TestWhoWaitsCopiesTheQueue: nobody else copies here, and there is room for two of ten pieces.
func TestWhoWaitsCopiesTheQueue(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		s.f.onHelp = func(tag uint64) bool { s.f.drop(tag, nil); return true }
		low := s.post(SwapOut, never, 10)
		check(t, low.Wait(within(t)))
		swapIn := s.post(SwapIn, never, 1)
		check(t, low.Post())
		ended := make(chan error)
		go func() { ended <- low.Wait(within(t)) }()
		s.end() // the swap-in, while low.Wait sleeps
		check(t, <-ended)
		require.True(t, swapIn.Done())
		s.alone()
	})
}

// TestWhoHasWaitedCopiesNothing: a Wait whose post has ended hands over nothing more of others.
func TestWhoHasWaitedCopiesNothing(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		swapIn := s.post(SwapIn, never, 1)
		first, mine := s.post(SwapOut, never, 1), s.post(SwapOut, never, 1)
		other := s.post(SwapOut, never, 100)
		require.Empty(t, s.submitted(first, mine, other))
		copying, before := make(chan struct{}), s.f.onSubmit
		s.f.onSubmit = func(n int, op driver.Op, tag uint64, notify bool) error {
			if slot, _, _ := untag(tag); slot == first.slot {
				<-copying // the goroutine of the scheduler
			}
			return before(n, op, tag, notify)
		}
		s.f.mu.Lock()
		s.f.manual = false
		s.f.finish(nil)
		s.f.mu.Unlock()
		require.True(t, swapIn.Done())
		synctest.Wait()
		check(t, mine.Wait(within(t)))
		require.Equal(t, []int{0}, s.submitted(mine, other))
		close(copying)
		check(t, other.Wait(within(t)))
		check(t, first.Wait(within(t)))
		s.alone()
	})
}

// TestWhoGivesUpCopiesNothing: a Wait whose context has ended, and an Abort, hand over nothing that
// is queued, of their own or of others.
func TestWhoGivesUpCopiesNothing(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		swapIn := s.post(SwapIn, never, 1)
		first, mine := s.post(SwapOut, never, 1), s.post(SwapOut, never, 1)
		other := s.post(SwapOut, never, 100)
		copying, before := make(chan struct{}), s.f.onSubmit
		s.f.onSubmit = func(n int, op driver.Op, tag uint64, notify bool) error {
			if slot, _, _ := untag(tag); slot == first.slot {
				<-copying // the goroutine of the scheduler
			}
			return before(n, op, tag, notify)
		}
		s.f.mu.Lock()
		s.f.manual = false
		s.f.finish(nil)
		s.f.mu.Unlock()
		require.True(t, swapIn.Done())
		synctest.Wait()
		over, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, mine.Wait(over), context.Canceled)
		require.Empty(t, s.submitted(mine, other))
		check(t, mine.Abort(within(t)))
		require.ErrorIs(t, mine.Err(), ErrAborted)
		require.Empty(t, s.submitted(mine, other))
		close(copying)
		check(t, other.Wait(within(t)))
		check(t, first.Wait(within(t)))
		s.alone()
	})
}

// TestResourcesTakeTurns: one that always has room does not keep the others waiting.
func TestResourcesTakeTurns(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		p, err := s.e.Self()
		check(t, err)
		swapIns := s.p.conns[0].resource.swapIns
		swapIns.Add(1)
		busy, other := s.post(SwapOut, never, 50), s.post(SwapOut, never, 50)
		x := transfer(t, p, Write)
		check(t, x.Schedule(Replicate, never))
		check(t, x.Add(s.r, 0, remote(t, p, "local"), 1<<15, 8*3))
		check(t, x.Post())
		require.Empty(t, s.submitted(busy, other, x))
		s.f.manual = false
		swapIns.Add(-1)
		s.e.schedule.wake()
		require.Equal(t, []int{0, 2, 0, 2, 0, 2}, s.submitted(busy, other, x)[:6])
		for _, x := range []*Transfer{busy, other, x} {
			check(t, x.Wait(within(t)))
		}
		s.alone()
	})
}

// TestARevokeDoesNotWaitForTheQueue: what is queued is no use of a lease, and fails once it has its
// turn.
func TestARevokeDoesNotWaitForTheQueue(t *testing.T) {
	a := open(t, "a", func(c *Config) { c.Schedule = &Schedule{} })
	b := open(t, "b")
	src, dst := register(t, a, "src", 1<<16), register(t, b, "dst", 1<<16)
	p := connect(t, a, b)
	lease, err := dst.Lease(0, 1<<16, LeaseOptions{})
	check(t, err)
	m, err := p.Import(lease.Token())
	check(t, err)
	hold := p.conns[0].resource.swapIns
	hold.Add(1) // a swap-in that does not end
	tr := transfer(t, p, Write)
	check(t, tr.Schedule(SwapOut, never))
	check(t, tr.Add(src, 0, m, 0, 1<<16))
	check(t, tr.Post())
	require.NotEmpty(t, tr.Explain().Waiting)
	check(t, lease.Revoke(within(t)))
	require.False(t, tr.Done())
	hold.Add(-1)
	a.schedule.wake()
	require.ErrorIs(t, tr.Wait(within(t)), ErrRevoked)
}

// TestTheQueueIsBounded in number; what was refused may be posted later.
func TestTheQueueIsBounded(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		list := []*Transfer{s.post(SwapOut, never, 2), s.post(Prefetch, never, 10)}
		more := s.make(Replicate, never, 1)
		require.ErrorIs(t, more.Post(), ErrBusy)
		require.Equal(t, state(idle), more.state().phase())
		list = append(list, s.post(SwapIn, never, 40)) // never refused
		require.EqualValues(t, 1, s.e.Stats().Classes[Replicate].Refused)
		s.endAll()
		for _, done := range list {
			check(t, done.Wait(within(t)))
		}
		check(t, more.Post())
		s.endAll()
		check(t, more.Wait(within(t)))
		s.alone()
	}, func(c *Config) {
		c.Schedule = &Schedule{BytesInFlight: 16, PieceBytes: 8, QueuedMax: 2}
	})
}

// TestAFailedPieceEndsTheQueued rest of its transfer.
func TestAFailedPieceEndsTheQueued(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		x := s.post(SwapOut, never, 9)
		s.submitted()
		s.f.finishOne(ErrCorrupt)
		s.f.finishOne(nil)
		require.ErrorIs(t, x.Wait(within(t)), ErrCorrupt)
		require.Empty(t, s.submitted(x))
		s.alone()
	})
}

// TestRoomOfABatchThatWasNotTaken comes back: the backend has refused it, or an Abort came while it
// was in the backlog.
func TestRoomOfABatchThatWasNotTaken(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		s.f.room = 1
		before := s.post(SwapOut, never, 1)
		full := s.post(SwapOut, never, 1)
		s.submitted()
		require.EqualValues(t, 1, s.p.conns[0].waiting.Load())
		check(t, full.Abort(within(t)))
		s.end()
		check(t, before.Wait(within(t)))
		s.alone()

		s.f.onSubmit = func(int, driver.Op, uint64, bool) error { return ErrCorrupt }
		require.ErrorIs(t, s.post(SwapOut, never, 3).Wait(within(t)), ErrCorrupt)
		s.alone()
	})
}

// TestRoomOfWhatWasGivenUp comes back, too: the connection is closed, but others share its room.
func TestRoomOfWhatWasGivenUp(t *testing.T) {
	testkit.InVirtualTime(t, func(t *testing.T) {
		f := &fake{manual: true, brokenClose: true}
		e := open(t, "e", over(f), func(c *Config) {
			c.Schedule = &Schedule{BytesInFlight: 8, PieceBytes: 8}
		})
		o := open(t, "other", over(&fake{}))
		register(t, o, "r", 1<<16)
		a, b, local := connect(t, e, o), connect(t, e, o), register(t, e, "local", 1<<16)
		b.conns[0].resource = a.conns[0].resource
		hurry(t, e, 30*time.Millisecond)
		post := func(p *Peer, timeout time.Duration) *Transfer {
			e.cfg.TransferTimeout = timeout
			tr := transfer(t, p, Write)
			check(t, tr.Schedule(SwapOut, never))
			check(t, tr.Add(local, 0, remote(t, p, "r"), 0, 8))
			check(t, tr.Post())
			return tr
		}
		stuck, other := post(a, 50*time.Millisecond), post(b, time.Hour)
		require.ErrorIs(t, stuck.Wait(within(t)), ErrTimeout)
		require.True(t, stuck.isUnproven())
		synctest.Wait()
		require.Len(t, f.seen(), 2, "both were handed over")
		for f.finishOne(nil) {
		}
		check(t, other.Wait(within(t)))
		check(t, stuck.Close())
	})
}

// TestExplainAndStatsOfASchedule.
func TestExplainAndStatsOfASchedule(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		urgent, x := s.post(SwapIn, never, 1), s.post(SwapOut, never, 3)
		time.Sleep(10 * time.Millisecond)
		at := x.Explain()
		require.Equal(t, Turn{Class: SwapOut, Resource: "fake to other",
			Waited: 10 * time.Millisecond, Waiting: "a swap-in is under way"}, at)
		require.Equal(t, 1, s.e.Stats().Classes[SwapOut].Queued)
		s.end()
		require.Contains(t, x.Explain().Waiting, "16 of 16 bytes are in flight")
		s.endAll()
		check(t, urgent.Wait(within(t)))
		check(t, x.Wait(within(t)))
		require.Equal(t, 10*time.Millisecond, x.Explain().Waited)
		c := s.e.Stats().Classes[SwapOut]
		require.Equal(t, ClassStats{Posts: 1, Waited: 10 * time.Millisecond}, c)
		require.Equal(t, "swap-in", s.make(SwapIn, never, 1).Explain().Class.String())
	})
}

func TestMisuseOfASchedule(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s *scheduled) {
		x := s.make(SwapOut, never, 1)
		require.ErrorIs(t, x.Schedule(Prefetch, never), ErrBusy, "its list is cut")
		require.ErrorIs(t, x.Schedule(classes, never), ErrNotSupported)
		check(t, x.Post())
		require.ErrorIs(t, x.Schedule(SwapOut, never), ErrBusy)
		s.endAll()
		check(t, x.Reset())
		check(t, x.Schedule(Prefetch, never))
	})
	for _, bad := range []Schedule{{BytesInFlight: 1 << 41}, {PieceBytes: 8 << 20},
		{BytesInFlight: 1 << 30, PieceBytes: 1 << 27}, {SwapOut: -1}, {QueuedMax: 1 << 21}} {
		_, err := bad.complete()
		require.ErrorIs(t, err, ErrBounds, "%+v", bad)
	}
	s, err := Schedule{BytesInFlight: 1 << 10}.complete()
	check(t, err)
	require.EqualValues(t, 1<<8, s.PieceBytes)
}

// TestWithoutAScheduleAClassChangesNothing, and costs nothing; nor does one that is never used.
func TestWithoutAScheduleAClassChangesNothing(t *testing.T) {
	for name, cfg := range map[string]*Schedule{"none": nil, "unused": {}, "swap-out": {}} {
		a, b := open(t, "a", func(c *Config) { c.Schedule = cfg }), open(t, "b")
		src := register(t, a, "src", 8<<20)
		register(t, b, "dst", 8<<20)
		p := connect(t, a, b)
		tr := transfer(t, p, Write)
		if name != "unused" {
			check(t, tr.Schedule(SwapOut, time.Now().Add(time.Hour)))
		}
		check(t, tr.Add(src, 0, remote(t, p, "dst"), 0, 8<<20))
		require.Equal(t, name == "swap-out", tr.grants != nil)
		require.Equal(t, name == "none", tr.resource == nil)
		post := func() {
			check(t, tr.Post())
			check(t, tr.Wait(context.Background()))
		}
		post()
		require.Equal(t, map[bool]int{true: 16, false: 1}[name == "swap-out"], len(tr.batches))
		require.Zero(t, testkit.AllocsPerRun(20, post), "%s: allocations a post", name)
	}
}

// TestNoWakeUpIsLost has posters of all classes, with deadlines and aborts at random, over
// connections that are shared: without the timers each post must end by the ends of others.
func TestNoWakeUpIsLost(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	a := open(t, "a", func(c *Config) {
		c.Schedule = &Schedule{BytesInFlight: 4 << 10, PieceBytes: 1 << 10, QueuedMax: 64}
		c.TransferTimeout = time.Hour
	})
	a.schedule.patience = time.Hour // only the end of a swap-in gives way
	b := open(t, "b")
	src := register(t, a, "src", 1<<20)
	register(t, b, "dst", 1<<20)
	peers := []*Peer{connect(t, a, b), connect(t, a, b)}
	const posters = 12
	var all sync.WaitGroup
	var moved, refused atomic.Int64
	for n := range posters {
		r := rand.New(rand.NewPCG(seed, uint64(n)))
		p, class := peers[n%2], Class(n%int(classes))
		tr := transfer(t, p, Write)
		check(t, tr.Schedule(class, never))
		check(t, tr.Add(src, 0, remote(t, p, "dst"), 0, uint64(1+r.IntN(16<<10))))
		all.Go(func() {
			for range 300 {
				var deadline time.Time
				if r.IntN(8) == 0 {
					deadline = time.Now().Add(time.Duration(r.IntN(100)) * time.Microsecond)
				}
				if err := tr.Schedule(class, deadline); err != nil {
					t.Error(err)
					return
				}
				if err := tr.Post(); errors.Is(err, ErrBusy) {
					refused.Add(1)
					runtime.Gosched()
					continue
				} else if err != nil {
					t.Error(err)
					return
				}
				if r.IntN(8) == 0 {
					if err := tr.Abort(within(t)); err != nil {
						t.Error("abort:", err)
						return
					}
				}
				ctx, cancel := context.WithTimeout(context.Background(), limit)
				err := tr.Wait(ctx)
				cancel()
				if errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, ErrTimeout) {
					t.Errorf("%v never ended: %v", class, tr.Explain())
					return
				}
				if err == nil {
					moved.Add(1)
				}
			}
		})
	}
	all.Wait()
	require.Positive(t, moved.Load())
	s := a.schedule
	s.mu.Lock()
	defer s.mu.Unlock()
	require.Empty(t, s.blocked)
	require.Zero(t, s.waiting.Load())
	for _, p := range peers {
		r := p.conns[0].resource
		require.Zero(t, r.inFlight+uint64(r.posts+r.queued))
		require.Zero(t, r.swapIns.Load())
	}
	t.Logf("%d succeeded, %d were refused", moved.Load(), refused.Load())
}

// TestHopsOfAChainAreNotScheduled: a swap-out by a chain is none of the swap-ins that hold others
// back.
func TestHopsOfAChainAreNotScheduled(t *testing.T) {
	a := newHost(t, "a", func(c *Config) { // one piece at a time
		c.Schedule = &Schedule{BytesInFlight: 128 << 10, PieceBytes: 128 << 10}
	})
	b := newHost(t, "b", func(c *Config) { c.Schedule = &Schedule{} })
	p := connect(t, a.e, b.e)
	tr := transfer(t, p, Write)
	check(t, tr.Schedule(SwapOut, never))
	check(t, tr.Add(a.hbm, 0, remote(t, p, "hbm"), 0, hostBytes))
	run(t, tr)
	require.Equal(t, "staged to b", tr.Explain().Resource)
	for _, h := range []*host{a, b} {
		require.Zero(t, h.e.Stats().Classes[SwapIn].Posts)
	}
}

// TestFilesAreScheduledByFile: what waits for one disk holds up no other, and a swap-in over the
// network no disk.
func TestFilesAreScheduledByFile(t *testing.T) {
	f := &fake{manual: true}
	e := open(t, "e", func(c *Config) {
		c.Backends, c.Schedule = []driver.Backend{f}, &Schedule{}
	})
	local, one, two := register(t, e, "local", 1<<16),
		register(t, e, "one", 1<<16), register(t, e, "two", 1<<16)
	p, err := e.Self()
	check(t, err)
	for _, r := range []*Region{one, two} { // the fake takes no files
		r.file = e.schedule.newResource("file "+r.name, new(atomic.Int64))
	}
	resource := func(from *Region, to string) *resource {
		tr := transfer(t, p, Write)
		check(t, tr.Add(from, 0, remote(t, p, to), 0, 1))
		return tr.resource
	}
	require.Same(t, one.file, resource(local, "one"))
	require.Same(t, two.file, resource(local, "two"))
	require.Same(t, one.file, resource(one, "two"))
	require.Same(t, p.conns[0].resource, resource(local, "local"))
	other := open(t, "other", over(&fake{}))
	register(t, other, "r", 1<<16)
	far := connect(t, e, other)
	tr := transfer(t, far, Write)
	check(t, tr.Add(one, 0, remote(t, far, "r"), 0, 1))
	require.Same(t, far.conns[0].resource, tr.resource, "a peer that takes nothing holds no file")
	tr = transfer(t, p, Write)
	require.ErrorIs(t, tr.Add(one, 1<<20, remote(t, p, "two"), 0, 1), ErrBounds)
	check(t, tr.Add(local, 0, remote(t, p, "local"), 0, 1))
	require.Same(t, p.conns[0].resource, tr.resource, "what was refused is no entry")
	require.NotSame(t, one.file.swapIns, p.conns[0].resource.swapIns)
}

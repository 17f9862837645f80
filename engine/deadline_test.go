// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/stretchr/testify/require"
)

// overFake opens an engine over a fake, with its own region as the peer's. Only where transfers are
// to end by a short timeout the grace is short, too: both from when the peer is connected.
func overFake(t *testing.T, f *fake, timeout time.Duration) (*Peer, *Region, *Remote) {
	t.Helper()
	e := open(t, "fake", func(c *Config) {
		c.Backends, c.TransferTimeout = []driver.Backend{f}, max(timeout, limit)
	})
	r := register(t, e, "r", 1<<16)
	p, err := e.Self()
	check(t, err)
	if timeout < limit {
		e.cfg.TransferTimeout = timeout
		hurry(t, e, 30*time.Millisecond)
	}
	return p, r, remote(t, p, "r")
}

func scattered(t *testing.T, tr *Transfer, r *Region, m *Remote, n int) {
	t.Helper()
	for i := range uint64(n) {
		check(t, tr.Add(r, i*2, m, 1<<15+i*2, 1))
	}
}

func TestTimeoutDisconnects(t *testing.T) { testkit.InVirtualTime(t, timeoutDisconnects) }

func timeoutDisconnects(t *testing.T) {
	p, r, m := overFake(t, &fake{manual: true}, 50*time.Millisecond)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, m, 3)
	check(t, tr.Post())
	require.ErrorIs(t, tr.Wait(within(t)), ErrTimeout)
	check(t, tr.Abort(within(t))) // the closed connection is the proof
	select {
	case <-p.Lost():
	case <-time.After(limit):
		t.Error("the peer is not lost")
	}
	require.ErrorIs(t, transfer(t, p, Write).Add(r, 0, m, 0, 1), ErrPeerLost,
		"add towards a lost peer")
}

// keptOff is a fake whose Poll hands out what Peer.Close has completed only once f has returned, as
// where the scheduler keeps the goroutine off that polls.
type keptOff struct {
	*fake
	f func()
}

func (k *keptOff) Poll(done []driver.Completion) (int, error) {
	n, err := k.fake.Poll(done)
	for _, c := range done[:n] {
		if errors.Is(c.Err, driver.ErrClosed) {
			k.f()
			break
		}
	}
	return n, err
}

// TestACompletionInHandIsNotGivenUp has the sweeper find a transfer late whose last completion
// another goroutine has just taken.
func TestACompletionInHandIsNotGivenUp(t *testing.T) {
	testkit.InVirtualTime(t, aCompletionInHandIsNotGivenUp)
}

func aCompletionInHandIsNotGivenUp(t *testing.T) {
	var e *Engine
	k := &keptOff{fake: &fake{manual: true}}
	k.f = func() { time.Sleep(20 * e.sweeper.period) }
	e = open(t, "fake", func(c *Config) { c.Backends = []driver.Backend{k} })
	r := register(t, e, "r", 1<<16)
	p, err := e.Self()
	check(t, err)
	e.cfg.TransferTimeout = 20 * time.Millisecond
	hurry(t, e, 30*time.Millisecond)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, remote(t, p, "r"), 3)
	check(t, tr.Post())
	require.ErrorIs(t, tr.Wait(within(t)), ErrTimeout)
	check(t, tr.Abort(within(t)))
	check(t, tr.Close())
	check(t, r.Close())
}

// TestAbortBesideItsTimeout aborts posts that are past their deadline just now: whichever of the
// two cancels first, the backend has its grace, and keeps its connection.
func TestAbortBesideItsTimeout(t *testing.T) {
	f := &fake{manual: true}
	f.onCancel = func(tag uint64) { f.drop(tag, driver.ErrAborted) }
	p, r, m := overFake(t, f, limit)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, m, 1)
	var over atomic.Bool
	var sweeps sync.WaitGroup
	sweeps.Go(func() {
		for !over.Load() {
			p.e.sweeper.sweep()
		}
	})
	defer sweeps.Wait()
	defer over.Store(true)
	for range 5000 {
		require.NoError(t, tr.Post())
		tr.deadline.Store(0)
		require.NoError(t, tr.Abort(within(t)))
		require.False(t, p.conns[0].isLost(), "the connection was closed without a grace")
	}
}

// TestProgressIsGivenTime: the time of a transfer begins anew with each batch that ends well,
// but not once it is being ended.
func TestProgressIsGivenTime(t *testing.T) { testkit.InVirtualTime(t, progressIsGivenTime) }

func progressIsGivenTime(t *testing.T) {
	f := &fake{manual: true}
	p, r, m := overFake(t, f, limit)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, m, 4)
	require.NoError(t, tr.Post())
	first := tr.deadline.Load()
	time.Sleep(time.Millisecond)
	f.finishOne(nil)
	require.Eventually(t, func() bool {
		return tr.deadline.Load() > first
	}, limit, time.Millisecond)
	require.False(t, tr.Done())

	generation, ok := tr.pin()
	require.True(t, ok)
	late := time.Duration(tr.deadline.Load())
	p.e.sweeper.expire(tr, generation, late)
	ending := tr.deadline.Load()
	require.Equal(t, int64(late+p.e.cfg.AbortGrace), ending)
	tr.extendDeadline(generation)
	tr.unpin()
	require.LessOrEqual(t, tr.deadline.Load(), ending)
	for f.finishOne(driver.ErrAborted) {
	}
	require.ErrorIs(t, tr.Wait(within(t)), ErrTimeout)
}

// TestLongTransfersAreCut, so that they are seen to make progress.
func TestLongTransfersAreCut(t *testing.T) {
	c := &conn{lane: &lane{caps: driver.Caps{DescsMax: 3, RunsMax: 7}}}
	g := &group{conn: c}
	g.add(driver.Desc{Len: 5 * batchBytesMax}, (&Transfer{}).lenMax(c))
	require.Len(t, g.descs, 5)
	require.Equal(t, driver.Desc{Local: 4 * batchBytesMax, Remote: 4 * batchBytesMax,
		Len: batchBytesMax}, g.descs[4])
	require.Equal(t, 1, c.nextBatch(g.descs, batchBytesMax))
	half := driver.Desc{Len: batchBytesMax / 2}
	require.Equal(t, 2, c.nextBatch([]driver.Desc{half, half, half}, batchBytesMax))
	require.Equal(t, 1, c.nextBatch([]driver.Desc{{Len: batchBytesMax}, half},
		batchBytesMax))
	require.Equal(t, 3, c.nextBatch(make([]driver.Desc, 5), batchBytesMax))
	require.Equal(t, 2, c.entriesMax(&Pattern{Run: batchBytesMax / 4, Count: 9,
		Loops: []Loop{{N: 2}}}, batchBytesMax))
	require.Equal(t, 1, c.entriesMax(&Pattern{Run: 2 * batchBytesMax, Count: 9}, batchBytesMax))
	require.Equal(t, 7, c.entriesMax(&Pattern{Run: 1, Count: 9}, batchBytesMax))
}

// TestHelloThatDoesNotEnd: the connection is closed while the Peer is being made.
func TestHelloThatDoesNotEnd(t *testing.T) { testkit.InVirtualTime(t, helloThatDoesNotEnd) }

func helloThatDoesNotEnd(t *testing.T) {
	b := open(t, "b", func(c *Config) { c.Backends = []driver.Backend{&fake{}} })
	a := open(t, "a", func(c *Config) {
		c.Backends, c.AbortGrace = []driver.Backend{&fake{manual: true, hellos: true}},
			10*time.Millisecond
	})
	d, err := b.Describe()
	require.NoError(t, err)
	p, err := a.Connect(within(t), d)
	require.NoError(t, err) // it was not told that the peer is lost
	select {
	case <-p.Lost():
	case <-time.After(limit):
		t.Error("the peer is not lost")
	}
}

func TestTimeoutWithoutProof(t *testing.T) { testkit.InVirtualTime(t, timeoutWithoutProof) }

func timeoutWithoutProof(t *testing.T) {
	p, r, m := overFake(t, &fake{manual: true, brokenClose: true}, 50*time.Millisecond)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, m, 3)
	check(t, tr.Post())
	require.ErrorIs(t, tr.Wait(within(t)), ErrTimeout)
	require.Error(t, tr.Abort(within(t)), "Abort claims a proof that nobody gave")
	require.ErrorIs(t, tr.Post(), ErrBusy, "post after being given up")
	check(t, tr.Close())
	require.ErrorIs(t, r.Close(), ErrBusy, "a region that may still be written to was closed")
}

func TestWaitEndsWithoutTheTransfer(t *testing.T) {
	testkit.InVirtualTime(t, waitEndsWithoutTheTransfer)
}

func waitEndsWithoutTheTransfer(t *testing.T) {
	f := &fake{manual: true}
	p, r, m := overFake(t, f, limit)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, m, 1)
	check(t, tr.Post())
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if err := tr.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) || tr.Done() {
		t.Errorf("wait: %v, done %v", err, tr.Done())
	}
	require.ErrorIs(t, tr.Err(), ErrBusy, "outcome of a posted transfer")
	for _, misuse := range []func() error{tr.Post, tr.Reset, tr.Close, func() error {
		return tr.Add(r, 0, m, 0, 1)
	}, func() error { return tr.Notify(nil) }} {
		if err := misuse(); !errors.Is(err, ErrBusy) {
			t.Errorf("misuse of a posted transfer: %v", err)
		}
	}
	f.finishOne(nil)
	check(t, tr.Wait(within(t)))
}

// TestFullAndMany has a backend that takes two batches of one descriptor at a
// time: every piece goes out once, in order, and the message after all others.
func TestFullAndMany(t *testing.T) {
	f := &fake{room: 2, manual: true}
	p, r, m := overFake(t, f, limit)
	first, second := transfer(t, p, Write), transfer(t, p, Write)
	scattered(t, first, r, m, 200)
	scattered(t, second, r, m, 3)
	check(t, first.Notify([]byte("end")))
	check(t, first.Post())
	check(t, second.Post())
	for end := time.Now().Add(limit); time.Now().Before(end) && !(first.Done() && second.Done()); {
		f.finishOne(nil)
	}
	check(t, first.Err())
	check(t, second.Err())
	sizes := f.seen()
	require.Len(t, sizes, 203, "batches")
	if i := slices.Index(sizes, -1); i < 199 {
		t.Errorf("the message went with batch %d, before the last of its transfer", i)
	}
}

func TestErrorSkipsTheRest(t *testing.T) {
	f := &fake{room: 1, manual: true}
	p, r, m := overFake(t, f, limit)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, m, 10)
	check(t, tr.Post())
	cause := &driver.PieceError{Piece: 0, Err: ErrRevoked}
	f.finishOne(cause)
	for end := time.Now().Add(limit); !tr.Done() && time.Now().Before(end); {
		f.finishOne(nil) // a second one may have taken the room before the error was seen
	}
	err := tr.Wait(within(t))
	var op *OpError
	if !errors.Is(err, ErrRevoked) || !errors.As(err, &op) || op.Backend != "fake" ||
		op.Peer != "fake" || op.Op != "write" {
		t.Errorf("got %v", err)
	}
	if n := len(f.seen()); n > 2 {
		t.Errorf("%d batches went out after the error", n-1)
	}
	require.EqualValues(t, 1, p.e.Stats().Routes[0].Errors["revoked"],
		"revoked transfers")
}

func TestDoubleCompletionsAreCountedAndDropped(t *testing.T) {
	f := &fake{double: true}
	p, r, m := overFake(t, f, limit)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, m, 5)
	for range 10 {
		check(t, tr.Post())
		check(t, tr.Wait(within(t)))
	}
	// The last of them may be in the hands of the progress goroutine still.
	until(t, "the second ones are counted", func() bool { return p.e.Stats().Stray >= 50 })
	require.EqualValues(t, 50, p.e.Stats().Stray)
	f.manual = true
	check(t, tr.Post())
	f.finishOne(nil)
	until(t, "the second one is counted", func() bool { return p.e.Stats().Stray == 51 })
	require.EqualValues(t, 4, tr.remaining.Load(), "one batch has ended two")
	for f.finishOne(nil) {
	}
	check(t, tr.Wait(within(t)))
}

func TestCloseEndsWhatIsPosted(t *testing.T) {
	f := &fake{manual: true}
	p, r, m := overFake(t, f, limit)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, m, 2)
	check(t, tr.Post())
	check(t, p.e.Close())
	if err := tr.Wait(within(t)); !errors.Is(err, ErrPeerLost) && !errors.Is(err, ErrClosed) {
		t.Errorf("got %v", err)
	}
	require.ErrorIs(t, second(p.e.Register("late", r.seg)), ErrClosed, "register after close")
}

// TestMessageWaitsForAllOthers: the batch with the message is not even submitted
// before the last of the others has ended, in whatever order they end.
func TestMessageWaitsForAllOthers(t *testing.T) {
	f := &fake{manual: true}
	p, r, m := overFake(t, f, limit)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, m, 4)
	check(t, tr.Notify([]byte("end")))
	check(t, tr.Post())
	for range 3 {
		if sizes := f.seen(); slices.Contains(sizes, -1) {
			t.Fatalf("batches %v: the message went while others were under way", sizes)
		}
		f.finishOne(nil)
		tr.Done()
	}
	for end := time.Now().Add(limit); !tr.Done() && time.Now().Before(end); {
		f.finishOne(nil)
	}
	check(t, tr.Err())
	if sizes := f.seen(); len(sizes) != 4 || sizes[3] != -1 {
		t.Errorf("batches %v, want the message with the last of four", sizes)
	}
}

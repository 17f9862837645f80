// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/kv/pool"
)

// fence takes all of the decode side's blocks that are given back by now, marks
// every byte, and returns a check that nobody has written to them since.
func (p *pair) fence(t *testing.T, want ...uint32) (check func()) {
	t.Helper()
	s := p.pool.Stats()
	g, err := p.pool.TryAcquire(make([]pool.Hash, s.Free+s.Cached))
	require.NoError(t, err)
	for _, block := range want {
		if !slices.Contains(g.Blocks, block) {
			t.Errorf("block %d has not been given back", block)
		}
	}
	mark := bytes.Repeat([]byte{0x5A}, int(p.decode.geometry.BlockBytes()))
	for _, block := range g.Blocks {
		copy(p.decode.block(block), mark)
	}
	return func() {
		t.Helper()
		for _, block := range g.Blocks {
			if !bytes.Equal(p.decode.block(block), mark) {
				testkit.ErrorBroken(t, "something landed in block %d after the end", block)
			}
		}
		g.Release()
	}
}

// block returns the bytes of a block of a block-major pool.
func (s *side) block(block uint32) []byte {
	r, _ := s.geometry.Block(uint64(block))
	return s.region.Bytes()[r.Off : r.Off+r.Len]
}

// TestAbortAtAnyMoment ends requests from either side while layers are in
// flight, and uses their blocks again at once.
func TestAbortAtAnyMoment(t *testing.T) {
	for _, who := range []string{"sender", "receiver"} {
		t.Run(who, func(t *testing.T) {
			testkit.RunInVirtualTime(t, "mem", func(t *testing.T) {
				abortAtAnyMoment(t, newSlowMem, who)
			})
			t.Run("shm", func(t *testing.T) { abortAtAnyMoment(t, newShm, who) })
		})
	}
}

func abortAtAnyMoment(t *testing.T, open func(testing.TB) driver.Backend, who string) {
	p := newPair(t, setup{backend: open, model: large, blocks: 8})
	r := rand.New(rand.NewPCG(1, uint64(len(who))))
	ends := 0
	for number := range uint64(60) {
		push, q := p.begin(t, number, 1, 2, 3, 4)
		var all sync.WaitGroup
		layers := r.IntN(large.Layers + 1)
		all.Go(func() { pushUntilError(t, push, layers) })
		time.Sleep(time.Duration(r.IntN(4000)) * time.Microsecond)
		p.end(t, who, push, q)
		if q.Err() != nil {
			ends++
			p.checkEnd(t, who, push, q)
			check := p.fence(t, q.Blocks...)
			all.Wait()
			<-push.Ended()
			check()
		}
		all.Wait()
		q.Release()
	}
	t.Logf("%d of 60 requests ended early", ends)
	if ends == 0 { // some are begun and not pushed to their end
		t.Error("no request ended early")
	}
}

// pushUntilError pushes some layers, and finishes if it was all of them.
func pushUntilError(t *testing.T, push *Push, layers int) {
	for layer := range layers {
		if push.Layer(within(t), layer) != nil {
			return
		}
	}
	if layers == large.Layers {
		_ = push.Finish(within(t)) // or it was ended before
	}
}

// end ends a request from one side, and waits for the other.
func (p *pair) end(t *testing.T, who string, push *Push, q *Request) {
	t.Helper()
	var err error
	if who == "sender" {
		err = push.Abort(within(t))
	} else {
		err = q.Cancel(within(t))
	}
	require.NoError(t, err)
	<-q.Done()
}

// checkEnd checks what both sides learn.
func (p *pair) checkEnd(t *testing.T, who string, push *Push, q *Request) {
	t.Helper()
	<-push.Ended()
	want, here, there := engine.ErrAborted, push.Err(), q.Err()
	if who == "receiver" {
		want, here, there = ErrCancelled, q.Err(), push.Err()
	}
	var local, remote *EndError
	if !errors.As(here, &local) || !errors.Is(here, want) || local.Remote || local.Request != q.ID {
		t.Errorf("the side that ended it: %v", here)
	}
	if !errors.As(there, &remote) || !errors.Is(there, want) || !remote.Remote ||
		remote.Request != q.ID {
		t.Errorf("the other side: %v", there)
	}
	if err := push.Layer(within(t), 0); !errors.Is(err, want) {
		t.Errorf("a layer after the end: %v", err)
	}
	if err := push.Finish(within(t)); !errors.Is(err, want) {
		t.Errorf("finish after the end: %v", err)
	}
}

func TestAbortWhileWaitingForRoom(t *testing.T) {
	testkit.InVirtualTime(t, abortWhileWaitingForRoom)
}

func abortWhileWaitingForRoom(t *testing.T) {
	p := newPair(t, setup{blocks: 4})
	held := p.handOver(t, 1, 1, 2, 3)
	ctx, cancel := context.WithCancel(within(t))
	failed := make(chan error)
	go func() {
		_, err := p.sender.Begin(ctx, p.prefill.peer, 2, p.request(t, 7, 8))
		failed <- err
	}()
	await(t, "a request waits", func() bool { return p.pool.Stats().Waiting == 1 })
	cancel()
	if err := <-failed; !errors.Is(err, context.Canceled) || !errors.Is(err, engine.ErrAborted) {
		t.Errorf("begin: %v", err)
	}
	await(t, "the receiver gives up", func() bool { return p.receiver.Stats().Ended[Aborted] == 1 })
	held.Release()
	p.handOver(t, 3, 7, 8).Release()
}

func TestReleaseBeforeTheEndCancels(t *testing.T) {
	p := newPair(t, setup{})
	push, q := p.begin(t, 1, 1, 2)
	q.Release()
	<-q.Done()
	<-push.Ended()
	p.checkEnd(t, "receiver", push, q)
}

func TestCloseEndsRequests(t *testing.T) {
	p := newPair(t, setup{})
	a, qa := p.begin(t, 1, 1, 2)
	if err := p.sender.Close(); err != nil {
		t.Error(err)
	}
	<-qa.Done()
	if !errors.Is(a.Err(), engine.ErrClosed) || !errors.Is(qa.Err(), engine.ErrClosed) {
		t.Errorf("closed sender: %v, receiver: %v", a.Err(), qa.Err())
	}
	if _, err := p.sender.Begin(within(t), p.prefill.peer, 2, nil); !errors.Is(err,
		engine.ErrClosed) {
		t.Errorf("begin after close: %v", err)
	}
	p.sender, _ = NewSender(p.prefill.mux, SenderConfig{Region: p.prefill.region,
		Geometry: p.prefill.geometry})
	b, qb := p.begin(t, 3, 1, 2)
	p.receiver.Close()
	<-b.Ended()
	if !errors.Is(b.Err(), engine.ErrClosed) || !errors.Is(qb.Err(), engine.ErrClosed) {
		t.Errorf("closed receiver: %v, sender: %v", qb.Err(), b.Err())
	}
	if _, err := p.receiver.Accept(within(t)); !errors.Is(err, engine.ErrClosed) {
		t.Errorf("accept after close: %v", err)
	}
}

// await waits for something that has no channel of its own.
func await(t *testing.T, what string, f func() bool) {
	t.Helper()
	for start := time.Now(); !f(); time.Sleep(time.Millisecond) {
		if time.Since(start) > limit {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestBye closes connections with a Grace that the test does not wait for: what ends them in
// time is what the two sides tell each other, and not the lease that covers for it.
func TestBye(t *testing.T) {
	const grace = graceMax
	testkit.CheckLeaks(t)
	open := func() *Backend {
		return openBackend(t, onLoopback(Config{Grace: grace}))
	}
	far, near := open(), open()
	connect := func() driver.Peer {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		p, err := near.Connect(ctx, far.Addr())
		require.NoError(t, err)
		return p
	}
	inTime(t, "the peer closes", connect().Close)
	parted(t, far, "a peer that closed")

	p := connect()
	inTime(t, "the owner's backend closes", far.Close)
	select {
	case <-p.Lost():
	case <-time.After(patience):
		t.Error("a peer does not hear that the owner's backend has closed")
	}
	inTime(t, "the peer of a closed backend closes", p.Close)

	far = open()
	connect()
	inTime(t, "the initiator's backend closes", near.Close)
	parted(t, far, "a backend that closed")
	inTime(t, "the backend closes", far.Close)
}

func inTime(t *testing.T, what string, f func() error) {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		require.NoError(t, err, "%s", what)
	case <-time.After(graceMax):
		t.Fatalf("%s: not within %v", what, graceMax)
	}
}

// parted waits for the last word, which is all that comes.
func parted(t *testing.T, b *Backend, of string) {
	t.Helper()
	var msgs []driver.Message
	eventually(t, "the last word of "+of, func() bool {
		msgs = append(msgs, received(t, b)...)
		return len(msgs) > 0
	})
	if len(msgs) != 1 || !errors.Is(msgs[0].Err, driver.ErrPeerLost) {
		t.Errorf("messages of %s: %+v, want the last word alone", of, msgs)
	}
}

// TestLossIsToldToThePeer: an owner that gives a peer up, since that sends more than it keeps,
// takes nothing of it any more. The peer must not go on and believe that it does.
func TestLossIsToldToThePeer(t *testing.T) {
	testkit.CheckLeaks(t)
	far := openBackend(t, onLoopback(Config{NotifyMax: 16}))
	defer far.Close()
	near := openBackend(t, onLoopback(Config{NotifyMax: 8 << 10}))
	defer near.Close()
	p, err := near.Connect(t.Context(), far.Addr())
	require.NoError(t, err)
	tag := uint64(0)
	submit := func(b *driver.Batch) error {
		tag++
		if err := p.Submit(tag, b); err != nil {
			return err
		}
		var done [1]driver.Completion
		eventually(t, "a batch ends", func() bool {
			n, err := near.Poll(done[:])
			require.NoError(t, err)
			return n == 1
		})
		return done[0].Err
	}
	note := driver.Batch{Op: driver.Write, Tail: driver.NotifyTail, Notify: []byte("x")}
	for n := 0; n < 1<<10 && err == nil; n++ {
		err = submit(&note)
	}
	require.NoError(t, err)
	_ = submit(&note) // one more than the owner keeps
	select {
	case <-p.Lost():
	case <-time.After(patience):
		t.Fatalf("the peer is not lost, and the end of one more message is: %v", submit(&note))
	}
}

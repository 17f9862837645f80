// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/control"
	"github.com/sluicehq/sluice/internal/lobby"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// kept is what the inbox of a backend holds, in bytes of messages.
func kept(b *Backend) (bytes int) {
	b.inbox.mu.Lock()
	defer b.inbox.mu.Unlock()
	for _, m := range b.inbox.list {
		bytes += len(m.data)
	}
	return bytes
}

// TestMessagesOfAllPeersAreBounded: peers that send to a program which does not receive have it
// keep Config.NotifyBytes, and one message each beside. All arrive, once it receives.
func TestMessagesOfAllPeersAreBounded(t *testing.T) {
	leak.Check(t)
	const peers, each, size, most = 4, 8, 8 << 10, 32 << 10
	owner := open(t, Config{NotifyBytes: most})
	near := open(t, Config{})
	for i := range uint64(peers) {
		p := dial(t, near, owner.Addr())
		for n := range uint64(each) {
			require.NoError(t, p.Submit(i*each+n, &driver.Batch{Op: driver.Write,
				Tail: driver.NotifyTail, Notify: make([]byte, size)}))
		}
	}
	require.Eventually(t, func() bool { return kept(owner) >= most/2 }, limit, time.Millisecond)
	for range 50 {
		time.Sleep(time.Millisecond)
		require.LessOrEqual(t, kept(owner), most/2+peers*size)
	}
	for range peers * each {
		require.Len(t, receive(t, owner).Data, size)
	}
	require.Zero(t, owner.quotas.messages.Sum())
}

// TestOneMessageOfEachPeerGoesBeside: a peer whose messages are received has the next one arrive,
// whatever others hold of the sum.
func TestOneMessageOfEachPeerGoesBeside(t *testing.T) {
	leak.Check(t)
	const count = 300
	owner, near := open(t, Config{}), open(t, Config{})
	owner.quotas.add(&owner.quotas.messages, lobby.Host{}, owner.cfg.NotifyBytes)
	p := dial(t, near, owner.Addr())
	sent := make(chan error, 1)
	go func() {
		for i := range uint64(count) {
			err := driver.ErrFull
			for errors.Is(err, driver.ErrFull) {
				err = p.Submit(i, &driver.Batch{Op: driver.Write, Tail: driver.NotifyTail,
					Notify: []byte{1}})
			}
			if err != nil {
				sent <- err
				return
			}
		}
		sent <- nil
	}()
	for range count {
		require.Len(t, receive(t, owner).Data, 1)
	}
	require.NoError(t, <-sent)
}

// TestAnswersOfAllOwnersAreBounded is the same the other way.
func TestAnswersOfAllOwnersAreBounded(t *testing.T) {
	leak.Check(t)
	const each, size, most = 8, 8 << 10, 32 << 10
	owner, near := open(t, Config{}), open(t, Config{NotifyBytes: most})
	for range 2 {
		notify(t, dial(t, near, owner.Addr()), "question")
		question := receive(t, owner)
		for range each {
			require.NoError(t, owner.Answer(question.Conn, make([]byte, size)))
		}
	}
	require.Eventually(t, func() bool { return kept(near) >= most/2-size }, limit, time.Millisecond)
	for range 50 {
		time.Sleep(time.Millisecond)
		require.LessOrEqual(t, kept(near), most/2+2*size)
	}
	for range 2 * each {
		require.Len(t, receive(t, near).Data, size)
	}
	require.Zero(t, near.quotas.messages.Sum())
}

// TestPeersThatLeaveMessages hold their places until these are received: otherwise one that comes
// again and again would have the program keep any number.
func TestPeersThatLeaveMessages(t *testing.T) {
	leak.Check(t)
	owner, near := open(t, Config{PeersMax: 4}), open(t, Config{})
	leave := func() error {
		p, err := near.Connect(t.Context(), owner.Addr())
		if err != nil {
			return err
		}
		notify(t, p.(*peer), "left behind")
		return p.Close()
	}
	require.NoError(t, leave())
	require.NoError(t, leave())
	require.ErrorIs(t, leave(), driver.ErrFull)
	require.Equal(t, "left behind", string(receive(t, owner).Data))
	require.Eventually(t, func() bool {
		drain(t, owner)
		return leave() == nil
	}, limit, time.Millisecond)
}

// TestConnectionsOfAllPeersAreBounded: peers that ask for more than we open ourselves share what
// is left.
func TestConnectionsOfAllPeersAreBounded(t *testing.T) {
	leak.Check(t)
	b := open(t, Config{PeersMax: 128})
	status := func() error {
		c := rawDial(t, b)
		_, err := c.Write(helloFrame(b, 1+connsMax))
		require.NoError(t, err)
		h, _, err := readFrame(c, kindWelcome)
		require.NoError(t, err)
		return refusal(control.Status(h.status))
	}
	require.NoError(t, status())
	require.ErrorIs(t, status(), driver.ErrFull)
	p := dial(t, open(t, Config{}), b.Addr())
	require.NoError(t, p.Close())
}

// TestBatchesOfAllPeersAreBounded: what peers have us remember beyond an allowance has a sum, and a
// peer that has left holds none of it.
func TestBatchesOfAllPeersAreBounded(t *testing.T) {
	b := open(t, Config{})
	b.quotas.batches.Most = 2
	hoard := func(n uint64) *inbound {
		g := newInbound(b, 2)
		for i := range n {
			g.landed(i, true)
		}
		return g
	}
	require.False(t, hoard(batchesPerPeer).crowded())
	first := hoard(batchesPerPeer + 2)
	require.False(t, first.crowded())
	second := hoard(batchesPerPeer + 1)
	require.True(t, second.crowded())
	second.notifs.giveBack(second)
	first.notifs.giveBack(first)
	require.False(t, hoard(batchesPerPeer+1).crowded())
}

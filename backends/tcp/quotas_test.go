// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestPeersThatLeaveMessages hold their places until these are received: otherwise one that comes
// again and again would have the program keep any number.
func TestPeersThatLeaveMessages(t *testing.T) {
	testkit.CheckLeaks(t)
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
	testkit.CheckLeaks(t)
	b := open(t, Config{PeersMax: 128})
	status := func() error {
		c := rawDial(t, b)
		_, err := c.Write(helloFrame(b, 1+connsMax))
		require.NoError(t, err)
		h, _, err := readFrame(c, kindWelcome)
		require.NoError(t, err)
		return refusal(session.Status(h.status))
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
	second.notifs.releaseQuota(second)
	first.notifs.releaseQuota(first)
	require.False(t, hoard(batchesPerPeer+1).crowded())
}

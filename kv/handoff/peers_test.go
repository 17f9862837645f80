// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// counted is a backend that tells of each import and each drop before it makes it.
type counted struct {
	driver.Backend
	imports, drops func()
}

type countedPeer struct {
	driver.Peer
	c counted
}

func (c counted) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	p, err := c.Backend.Connect(ctx, addr)
	return countedPeer{p, c}, err
}

func (p countedPeer) Import(token []byte) (uint32, uint64, error) {
	p.c.imports()
	return p.Peer.Import(token)
}

func (p countedPeer) Drop(key uint32) {
	p.c.drops()
	p.Peer.Drop(key)
}

// TestGroupsOfLostPeers go with the connection: the next request over another makes one anew.
func TestGroupsOfLostPeers(t *testing.T) { over(t, groupsOfLostPeers) }

func groupsOfLostPeers(t *testing.T, open func(testing.TB) driver.Backend) {
	p := newPair(t, setup{backend: open})
	p.handOver(t, 1, 1, 2).Release()
	push, q := p.begin(t, 2, 3)
	require.NoError(t, p.prefill.peer.Close())
	<-push.Ended()
	require.ErrorIs(t, push.Err(), engine.ErrPeerLost)
	q.Release()
	await(t, "the group goes", func() bool {
		p.sender.peers.mu.Lock()
		defer p.sender.peers.mu.Unlock()
		return len(p.sender.peers.of) == 0
	})
	p.prefill.peer = connect(t, p.prefill.eng, p.decode.eng)
	<-q.Done()
	p.handOver(t, 3, 3).Release()
}

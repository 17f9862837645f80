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

// TestBeginHeedsItsContext between the imports of leases, of which each may wait for the receiver.
func TestBeginHeedsItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(within(t))
	imports := 0
	p := newPair(t, setup{backend: func(t testing.TB) driver.Backend {
		return counted{newMem(t), func() {
			if imports++; imports == 3 {
				cancel()
			}
		}, func() {}}
	}})
	_, err := p.sender.Begin(ctx, p.prefill.peer, 1, p.request(t, 1, 2, 3, 4, 5, 6, 7, 8))
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, 3, imports)
}

// TestLinesOfLostPeers go with the next push that ends, also where a peer was lost after its last.
func TestLinesOfLostPeers(t *testing.T) {
	p := newPair(t, setup{backend: newMem})
	lost, other := connect(t, p.prefill.eng, p.decode.eng), p.prefill.peer
	for _, peer := range []*engine.Peer{lost, other} {
		p.joinAndLeave(peer)
	}
	require.Len(t, p.sender.lines, 2)
	require.NoError(t, lost.Close())
	p.joinAndLeave(other)
	require.Len(t, p.sender.lines, 1)
}

func (p *pair) joinAndLeave(peer *engine.Peer) {
	p.sender.mu.Lock()
	push := &Push{line: p.sender.join(peer)}
	p.sender.mu.Unlock()
	p.sender.leave(push)
}

// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"sync"

	"github.com/sluicehq/sluice/internal/session"
)

// quotas limit what peers can make this process hold: amounts that all peers share, of which one
// host may use half. Beside them each peer has a small reserve of its own, which Config.PeersMax
// bounds, so that a host that uses up the shared amount cannot lock others out.
type quotas struct {
	mu      sync.Mutex        // the innermost lock, beside ctlMu
	batches session.HostCount // that are remembered; not counted: batchesPerPeer of each peer
	conns   session.HostCount // connections; not counted: as many of each peer as we open ourselves
}

const (
	batchesPerPeer = 1 << 10
	batchesShared  = 1 << 18
)

func (s *quotas) init(c *Config) {
	s.batches.Most = batchesShared
	s.conns.Most = max(c.PeersMax, 2*connsMax)
}

// add counts n more for a host, also where they do not fit: on false the caller takes them back. n
// may be negative.
func (s *quotas) add(of *session.HostCount, host session.Host, n int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	fits, _ := of.Fits(host, n)
	of.Add(host, n)
	return fits || n <= 0
}

// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"sync"

	"github.com/sluicehq/sluice/internal/lobby"
)

// quotas limit what peers can make this process hold: amounts that all peers share, of which one
// host may use half. Beside them each peer has a small reserve of its own, which Config.PeersMax
// bounds, so that a host that uses up the shared amount cannot lock others out.
type quotas struct {
	mu       sync.Mutex  // the innermost lock, beside ctlMu
	messages lobby.Count // bytes of messages, of Config.NotifyBytes; not counted: one of each peer
	batches  lobby.Count // that are remembered; not counted: batchesPerPeer of each peer
	conns    lobby.Count // connections; not counted: as many of each peer as we open ourselves
	waiting  map[*conn]struct{}
}

// messageCost is what a message takes beside its bytes, about.
const messageCost = 128

const (
	batchesPerPeer = 1 << 10
	batchesShared  = 1 << 18
)

func (s *quotas) init(c *Config) {
	s.messages.Most, s.batches.Most = c.NotifyBytes, batchesShared
	s.conns.Most = max(c.PeersMax, 2*connsMax)
	s.waiting = map[*conn]struct{}{}
}

// reserveMessage makes room for a message of a host. first: the peer has no other message here;
// that one is always accepted. On false c is put on the list of those that wait, and
// releaseMessages has its reader go on when room is freed.
func (s *quotas) reserveMessage(c *conn, host lobby.Host, bytes int, first bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if fits, _ := s.messages.Fits(host, bytes+messageCost); !fits && !first {
		s.waiting[c] = struct{}{}
		return false
	}
	s.messages.Add(host, bytes+messageCost)
	return true
}

// releaseMessages gives back the room of n messages of so many bytes.
func (s *quotas) releaseMessages(host lobby.Host, n, bytes int) {
	if n == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.messages.Add(host, -bytes-n*messageCost)
	for c := range s.waiting {
		delete(s.waiting, c)
		c.proceed()
	}
}

// forget is for a connection that is over.
func (s *quotas) forget(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.waiting, c)
}

// add counts n more for a host, also where they do not fit: on false the caller takes them back. n
// may be negative.
func (s *quotas) add(of *lobby.Count, host lobby.Host, n int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	fits, _ := of.Fits(host, n)
	of.Add(host, n)
	return fits || n <= 0
}

// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"sync"

	"github.com/sluicehq/sluice/internal/lobby"
)

// sums bound what all peers have us keep, of one host half as much. Each peer has an allowance
// beside it, which Config.PeersMax bounds, so that those who take all of a sum keep no other out.
type sums struct {
	mu      sync.Mutex  // the innermost lock, beside ctlMu
	notes   lobby.Count // bytes of messages, of Config.NotifyBytes: one of each peer goes beside it
	batches lobby.Count // that are remembered: rememberedOwn of each peer go beside it
	conns   lobby.Count // connections: as many of each peer as we open ourselves go beside it
	waiting map[*conn]struct{}
}

// noteCost is what a message takes beside its bytes, about.
const noteCost = 128

const (
	rememberedOwn = 1 << 10
	rememberedSum = 1 << 18
)

func (s *sums) init(c *Config) {
	s.notes.Most, s.batches.Most = c.NotifyBytes, rememberedSum
	s.conns.Most = max(c.PeersMax, 2*connsMax)
	s.waiting = map[*conn]struct{}{}
}

// takeNote makes room for a message of a host; alone: its peer has no other here. Where it reports
// false, the reader of c is told to go on once there may be some.
func (s *sums) takeNote(c *conn, host lobby.Host, bytes int, alone bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if fits, _ := s.notes.Fits(host, bytes+noteCost); !fits && !alone {
		s.waiting[c] = struct{}{}
		return false
	}
	s.notes.Add(host, bytes+noteCost)
	return true
}

// giveNotes gives back the room of n messages.
func (s *sums) giveNotes(host lobby.Host, n, bytes int) {
	if n == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.notes.Add(host, -bytes-n*noteCost)
	for c := range s.waiting {
		delete(s.waiting, c)
		c.proceed()
	}
}

// forget is for a connection that is over.
func (s *sums) forget(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.waiting, c)
}

// add has a host hold n more of a sum, and reports whether they fit; n may be negative.
func (s *sums) add(of *lobby.Count, host lobby.Host, n int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	fits, _ := of.Fits(host, n)
	of.Add(host, n)
	return fits || n <= 0
}

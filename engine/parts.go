// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/engine/internal/exchange"
)

// joining keeps the parts of long notifications until the last has come. A connection has one at a
// time, of NotifyMax bytes, and those of all connections take most. Where a part has no room, the
// origin that holds most loses a notification: the one that has had no part for longest. Since its
// sender would wait in vain, the connection is lost with it. One notification alone always has
// room.
type joining struct {
	most int

	mu    sync.Mutex // guards what follows
	of    map[*sender]*partial
	bytes int // that they take
	count uint64
}

// partial is the beginning of a notification.
type partial struct {
	data []byte
	last uint64 // of joining.count, when its last part came
	lost bool
}

// add adds a part. whole is the notification, once that was the last; an error ends the sender.
func (j *joining) add(s *sender, part []byte, limit int) (whole []byte, ok bool, err error) {
	if len(part) == 0 {
		return nil, false, nil
	}
	flags, data := part[0], part[1:]
	j.mu.Lock()
	defer j.mu.Unlock()
	if p := j.of[s]; p != nil && p.lost {
		return nil, false, fmt.Errorf("notifications that are under way take Config."+
			"NotificationBytes of %d, raise it: %w: %w", j.most, ErrFull, ErrPeerLost)
	}
	if flags&exchange.FirstPart != 0 {
		j.drop(s)
		if j.of == nil {
			j.of = map[*sender]*partial{}
		}
		j.of[s] = &partial{}
	}
	p := j.of[s]
	if p == nil || len(p.data)+len(data) > limit {
		j.drop(s)
		return nil, false, nil
	}
	j.count++
	p.last = j.count
	before := cap(p.data)
	p.data = append(p.data, data...)
	j.bytes += cap(p.data) - before
	if flags&exchange.LastPart != 0 {
		whole = p.data
		j.drop(s)
		return whole, true, nil
	}
	for j.bytes > j.most && j.holders() > 1 {
		v := j.of[j.loser()]
		j.bytes -= cap(v.data)
		v.data, v.lost = nil, true
	}
	return nil, false, nil
}

// holders counts those that hold anything.
func (j *joining) holders() (n int) {
	for _, p := range j.of {
		if !p.lost {
			n++
		}
	}
	return n
}

// loser is the sender that loses its notification.
func (j *joining) loser() (loser *sender) {
	bytes := map[string]int{}
	for s, p := range j.of {
		bytes[s.origin()] += cap(p.data)
	}
	for s, p := range j.of {
		if p.lost {
			continue
		}
		if loser != nil {
			a, b := bytes[s.origin()], bytes[loser.origin()]
			if a < b || a == b && p.last > j.of[loser].last {
				continue
			}
		}
		loser = s
	}
	return loser
}

// drop forgets what has come of a notification.
// Preconditions: j.mu is held.
func (j *joining) drop(s *sender) {
	if p := j.of[s]; p != nil {
		j.bytes -= cap(p.data)
		delete(j.of, s)
	}
}

// forget is drop for a sender that has ended.
func (j *joining) forget(s *sender) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.drop(s)
}

// origin says with which other senders this one has a share of a bound.
func (s *sender) origin() string {
	if s.ticket == nil {
		return noTicket
	}
	return s.ticket.origin
}

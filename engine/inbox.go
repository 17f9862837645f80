// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"sync"
	"sync/atomic"
	"time"
)

// inboxBytes counts the bytes of large notifications in the channel: full of others it takes no
// more than the budget. What has left the channel is known by how many went in and are there.
type inboxBytes struct {
	went atomic.Int64 // into the channel

	mu    sync.Mutex // guards what follows
	large []largeOne
	bytes int
}

// largeOne is a large notification in the channel. At least so many went in before it.
type largeOne struct {
	number int64
	bytes  int
}

// inboxPause is how long a goroutine waits with a large notification for the program to read.
const inboxPause = 2 * time.Millisecond

func (e *Engine) isLarge(n *Notification) bool {
	return len(n.Data) > e.cfg.NotificationBytes/e.cfg.NotificationsMax
}

// offer puts a notification into the channel. It reports false where there is no room.
func (e *Engine) offer(n Notification) bool {
	if e.isLarge(&n) {
		return e.offerLarge(n)
	}
	select {
	case e.inbox <- n:
		e.inboxed.went.Add(1)
		return true
	default:
		return false
	}
}

// offerLarge is offer within the budget. One alone always goes.
func (e *Engine) offerLarge(n Notification) bool {
	in := &e.inboxed
	in.mu.Lock()
	defer in.mu.Unlock()
	left := in.went.Load() - int64(len(e.inbox)) // at least so many
	for len(in.large) > 0 && in.large[0].number < left {
		in.bytes -= in.large[0].bytes
		in.large = in.large[1:]
	}
	if len(in.large) > 0 && in.bytes+len(n.Data) > e.cfg.NotificationBytes {
		return false
	}
	select {
	case e.inbox <- n:
		in.large = append(in.large, largeOne{in.went.Add(1) - 1, len(n.Data)})
		in.bytes += len(n.Data)
		return true
	default:
		return false
	}
}

// put is offer that waits for room. It reports false where the engine closes.
func (e *Engine) put(n Notification) bool {
	if !e.isLarge(&n) {
		select {
		case e.inbox <- n:
			e.inboxed.went.Add(1)
			return true
		case <-e.closing:
			return false
		}
	}
	for !e.offerLarge(n) {
		select {
		case <-time.After(inboxPause):
		case <-e.closing:
			return false
		}
	}
	return true
}

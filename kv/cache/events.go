// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
)

// EventKind is the kind of an Event.
type EventKind uint8

// The events.
const (
	Stored       EventKind = iota // its bytes are in memory, and found
	Removed                       // the cache does not have it any more
	Demoted                       // it has left memory; a disk has it
	DamagedBlock                  // its bytes were not what was stored; Removed follows
	Conflicted                    // a Store with another length or other bytes was refused
	// EventsLost is of no block: that many events found no room (Event.Lost).
	EventsLost
	eventKinds
)

var eventNames = [eventKinds]string{"stored", "removed", "demoted", "damaged", "conflict", "lost"}

// String returns a word.
func (k EventKind) String() string { return eventNames[min(k, eventKinds-1)] }

// Event is something that has happened to a block.
type Event struct {
	Kind      EventKind
	Namespace string   // "" where the program has not opened it yet
	Digest    [16]byte // of the namespace, as DigestOf makes it
	Key       Key
	Lost      uint64 // events before this one that its reader has missed
}

// listeners are the readers of events.
type listeners struct {
	listening sync.Mutex                  // of changes
	list      atomic.Pointer[[]*listener] // nil: there is none
}

type listener struct {
	lost atomic.Uint64

	mu     sync.Mutex // guards events; no goroutine waits while it holds it
	events chan Event // nil: closed
}

const (
	eventsMax    = 4 << 10 // that may wait for a reader
	listenersMax = 64
)

// Events returns the events from now on, until ctx or the cache ends, which closes the channel.
// Up to 4,096 events wait for a reader; those that find no room are counted by the next one that
// does, or by an EventsLost within a second or so. No reader holds the cache up. The order is that
// of what has happened to a block, but not between blocks. At most 64 readers may be there; a
// channel that is more is closed from the beginning.
func (c *Cache) Events(ctx context.Context) <-chan Event {
	l := &listener{events: make(chan Event, eventsMax)}
	events := l.events
	if !c.listen(l, true) {
		close(events)
		return events
	}
	ctx, cancel := c.within(ctx)
	context.AfterFunc(ctx, func() {
		cancel()
		c.listen(l, false)
		l.mu.Lock()
		defer l.mu.Unlock()
		close(l.events)
		l.events = nil
	})
	return events
}

// listen adds a listener, or removes it. It reports whether there was room.
func (c *Cache) listen(l *listener, add bool) bool {
	c.listening.Lock()
	defer c.listening.Unlock()
	var list []*listener
	if at := c.list.Load(); at != nil {
		list = slices.Clone(*at)
	}
	switch {
	case !add:
		list = slices.DeleteFunc(list, func(o *listener) bool { return o == l })
	case len(list) >= listenersMax:
		return false
	default:
		list = append(list, l)
	}
	if c.list.Store(&list); len(list) == 0 {
		c.list.Store(nil)
	}
	return true
}

// emit tells the listeners of an entry. The caller holds its shard's lock, or a pin.
func (c *Cache) emit(i uint32, kind EventKind) {
	if c.list.Load() != nil {
		e := c.index.entry(i)
		c.emitKey(e.space, e.key, kind)
	}
}

func (c *Cache) emitKey(id uint16, key Key, kind EventKind) {
	list := c.list.Load()
	if list == nil {
		return
	}
	e := Event{Kind: kind, Digest: c.spaces.digest(id), Key: key}
	if name := c.space(id).shown.Load(); name != nil {
		e.Namespace = *name
	}
	for _, l := range *list {
		l.send(e)
	}
}

// send never waits.
func (l *listener) send(e Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e.Lost = l.lost.Swap(0)
	select {
	case l.events <- e:
	default:
		l.lost.Add(e.Lost)
		if e.Kind != EventsLost {
			l.lost.Add(1)
		}
	}
}

// emitLost has readers learn of events that they have missed, where no other one follows.
func (c *Cache) emitLost() {
	if list := c.list.Load(); list != nil {
		for _, l := range *list {
			if l.lost.Load() > 0 {
				l.send(Event{Kind: EventsLost})
			}
		}
	}
}

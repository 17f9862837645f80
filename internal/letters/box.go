// SPDX-License-Identifier: Apache-2.0

package letters

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// Box holds what a backend has received until its program takes it. All methods but Open may be called by any goroutine.
type Box struct {
	addr string
	most int64
	wake func()
	news atomic.Bool // something for the sleeper that is in no list

	counters Counters
	promised atomic.Int64 // messages in list or on their way

	mu      sync.Mutex
	list    []driver.Message
	starved []*Box // of senders that found no place
}

// Open makes room for most messages. addr is the backend's, and wake rouses who sleeps until there is something for
// the program; it may be called with any lock held.
func (b *Box) Open(addr string, most int, wake func()) {
	b.addr, b.most, b.wake = addr, int64(most), wake
}

// Alarm wakes the sleeper for something that is in no list: Ready says so once.
func (b *Box) Alarm() {
	b.news.Store(true)
	b.wake()
}

// Ready reports whether there is a message, or was an alarm since it was last said.
func (b *Box) Ready() bool {
	b.mu.Lock()
	n := len(b.list)
	b.mu.Unlock()
	return n > 0 || b.news.Swap(false)
}

// Deliver brings a message that has a place, or one with Err, the last word of a peer, which needs none.
func (b *Box) Deliver(m driver.Message) {
	b.mu.Lock()
	b.list = append(b.list, m)
	b.mu.Unlock()
	b.wake()
}

// Receive moves messages into msgs and returns how many.
func (b *Box) Receive(msgs []driver.Message) int {
	b.mu.Lock()
	n := copy(msgs, b.list)
	b.list = slices.Delete(b.list, 0, n) // and keeps none of their bytes alive
	b.mu.Unlock()
	kept := 0
	for _, m := range msgs[:n] {
		if m.Err == nil {
			kept++ // the last word of a peer had no promise
		}
	}
	if kept > 0 {
		b.forget(kept)
	}
	return n
}

// promise takes a place. Where there is none, from is alarmed when one has come free.
func (b *Box) promise(from *Box) bool {
	for b.promised.Add(1) > b.most {
		b.promised.Add(-1)
		b.starve(from) // and look again: a place may have come free before
		if b.promised.Load() >= b.most {
			return false
		}
	}
	return true
}

func (b *Box) starve(from *Box) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !slices.Contains(b.starved, from) {
		b.starved = append(b.starved, from)
	}
}

// forget gives places back and alarms the senders that found none.
func (b *Box) forget(n int) {
	b.promised.Add(int64(-n))
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, from := range b.starved {
		from.Alarm()
	}
	clear(b.starved)
	b.starved = b.starved[:0]
}

// arrive counts one.
func (b *Box) arrive(number uint32) {
	if b.counters.Arrive(number) {
		b.Alarm()
	}
}

// Count is for driver.Counting.
func (b *Box) Count(counter uint32) uint64 { return b.counters.Count(counter) }

// AwaitCount is for driver.Counting.
func (b *Box) AwaitCount(counter uint32, n uint64) bool { return b.counters.Await(counter, n) }

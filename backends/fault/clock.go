// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"container/heap"
	"sync"
	"time"
)

// clock does what is due, in one goroutine.
type clock struct {
	mu      sync.Mutex // after backend.mu
	moments moments
	turns   uint64
	kick    chan struct{} // something is due earlier
	ended   chan struct{}
	once    sync.Once
}

// moment is a place in the heap. It belongs to its setter, and may be set again once
// it has come or was taken back.
type moment struct {
	at   time.Time
	turn uint64 // of two for the same time the first comes first
	pos  int    // in the heap, from 1; 0: not there
	come func() // called by the clock's goroutine, without a lock
}

func (c *clock) init() { c.kick, c.ended = make(chan struct{}, 1), make(chan struct{}) }

func (c *clock) stop() { c.once.Do(func() { close(c.ended) }) }

// set has m come at that time, in place of an earlier wish.
func (c *clock) set(m *moment, at time.Time) {
	c.mu.Lock()
	if m.pos > 0 {
		heap.Remove(&c.moments, m.pos-1)
	}
	c.turns++
	m.at, m.turn = at, c.turns
	heap.Push(&c.moments, m)
	first := m.pos == 1
	c.mu.Unlock()
	if first {
		select {
		case c.kick <- struct{}{}:
		default:
		}
	}
}

// cancel takes m back, and reports whether it was still to come.
func (c *clock) cancel(m *moment) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m.pos == 0 {
		return false
	}
	heap.Remove(&c.moments, m.pos-1)
	return true
}

// due takes the next moment that has come, or says when one will.
func (c *clock) due(now time.Time) (m *moment, wait time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.moments) == 0 {
		return nil, time.Hour
	}
	if wait = c.moments[0].at.Sub(now); wait > 0 {
		return nil, wait
	}
	return heap.Pop(&c.moments).(*moment), 0
}

// schedule is the goroutine.
func (b *Backend) schedule() {
	c := &b.clock
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		m, wait := c.due(time.Now())
		if m != nil {
			m.come()
			continue
		}
		timer.Reset(wait)
		select {
		case <-timer.C:
		case <-c.kick:
		case <-c.ended:
			return
		}
	}
}

// moments is the heap.
type moments []*moment

func (h moments) Len() int { return len(h) }
func (h moments) Less(i, j int) bool {
	if !h[i].at.Equal(h[j].at) {
		return h[i].at.Before(h[j].at)
	}
	return h[i].turn < h[j].turn
}

func (h moments) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].pos, h[j].pos = i+1, j+1
}

// Push implements heap.Interface.
func (h *moments) Push(x any) {
	m := x.(*moment)
	*h = append(*h, m)
	m.pos = len(*h)
}

// Pop implements heap.Interface.
func (h *moments) Pop() any {
	last := len(*h) - 1
	m := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	m.pos = 0
	return m
}

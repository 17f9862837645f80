// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// chore is what a host does in the background until it is told to stop.
type chore struct {
	stop    chan struct{}
	ended   chan struct{}
	outcome // written before ended is closed

	parkedBefore int64 // host.parked at its beginning
}

// outcome is what came of a chore.
type outcome struct {
	count  int // of what it did
	faults []string
}

func stopped(stop <-chan struct{}) bool {
	select {
	case <-stop:
		return true
	default:
		return false
	}
}

func (h *host) startChore(q request, f func(*host, request, <-chan struct{}) outcome) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.chore != nil {
		return errors.New("a chore is running already")
	}
	c := &chore{stop: make(chan struct{}), ended: make(chan struct{}),
		parkedBefore: h.parked.Load()}
	h.chore = c
	errands.run(func() {
		defer close(c.ended)
		c.outcome = f(h, q, c.stop)
	})
	return nil
}

// awaitParked waits until the chore comes to sleep on the backend's descriptor, or has ended.
func (h *host) awaitParked(limit time.Duration) error {
	h.mu.Lock()
	c := h.chore
	h.mu.Unlock()
	for wait := newPatience(limit); h.parked.Load() == c.parkedBefore; {
		if stopped(c.ended) {
			return nil
		}
		if !wait.more() {
			return errLate
		}
	}
	return nil
}

// endChore stops what runs in the background, if it has not ended by itself
// after the time given.
func (h *host) endChore(patience time.Duration) (outcome, error) {
	h.mu.Lock()
	c := h.chore
	h.chore = nil
	h.mu.Unlock()
	if c == nil {
		return outcome{}, nil
	}
	select {
	case <-c.ended:
		return c.outcome, nil
	case <-time.After(patience):
	}
	close(c.stop)
	select {
	case <-c.ended:
		return c.outcome, nil
	case <-time.After(h.h.Limit):
		return outcome{}, fmt.Errorf("stop the background transfers: %w", errLate)
	}
}

// flood keeps q.Count batches in flight, and helps if asked to, until it is told to stop or one
// fails. What it returns are the failures, as the caller may well expect some.
func (h *host) flood(q request, stop <-chan struct{}) outcome {
	var failures []string
	tags := make([]uint64, 0, q.Count)
	p := h.peer(q.Peer)
	b := driver.Batch{Op: q.Op, Descs: q.Descs}
	for !stopped(stop) && len(failures) == 0 {
		if len(tags) < q.Count {
			tag := h.ledger.tag()
			err := p.Submit(tag, &b)
			if err == nil {
				tags = append(tags, tag)
				continue
			}
			h.ledger.refuse(tag)
			if !errors.Is(err, driver.ErrFull) {
				failures = append(failures, err.Error())
				break
			}
		}
		if q.Help {
			p.Help(tags[len(tags)-1], stop)
		}
		tags = h.reap(tags, &failures)
		runtime.Gosched()
	}
	for _, tag := range tags {
		if err := h.ledger.await(tag, h.h.Limit); err != nil {
			failures = append(failures, err.Error())
		}
	}
	return outcome{faults: failures}
}

// reap polls once and returns the tags that are still in flight.
func (h *host) reap(tags []uint64, failures *[]string) []uint64 {
	if _, err := h.ledger.poll(); err != nil {
		*failures = append(*failures, err.Error())
	}
	left := tags[:0]
	for _, tag := range tags {
		done, err := h.ledger.outcome(tag)
		if !done {
			left = append(left, tag)
		} else if err != nil {
			*failures = append(*failures, err.Error())
		}
	}
	return left
}

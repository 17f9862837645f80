// SPDX-License-Identifier: Apache-2.0

// Package schedule chooses the prefill and the decode instance of a request by where its prefix is
// cached, as the conductor of Mooncake does (Qin et al., FAST 2025, Algorithm 1).
//
// A prefill instance that has a much shorter prefix than the best one is taken to copy what it
// lacks from there first. Of all prefill instances the one is chosen that would have the first
// token soonest, and of the decode instances the one with the shortest step. A request for which
// either would come too late is refused before anything is spent on it.
//
// The package only decides: what it must know of the instances it asks of its caller, and the
// caller copies the blocks and sends the request on. Of a cache of kv/cache, Match tells the prefix
// and Estimate how long its blocks take to leave it.
package schedule

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// Prefill is what the prefill instances would do with one request. Instances are numbered from 0.
type Prefill interface {
	// Len is how many instances there are.
	Len() int
	// Cached is how many tokens of the request's beginning an instance has in its cache.
	Cached(instance int) int
	// Queue is how long an instance works on the requests that it was given before.
	Queue(instance int) time.Duration
	// Compute is how long an instance computes the request when it begins with so many tokens of
	// it cached.
	Compute(instance, cached int) time.Duration
	// Transfer is how long the last of the tokens that another instance has cached take to come.
	Transfer(from, to, tokens int) time.Duration
}

// Decode is what the decode instances would do with one request.
type Decode interface {
	// Len is how many instances there are.
	Len() int
	// Step is how long a step of an instance would take with the request in its batch: the time
	// between two tokens. Never says that the instance has no room for the request.
	Step(instance int) time.Duration
}

// Never is a time that is longer than any limit.
const Never = time.Duration(math.MaxInt64)

// Conductor places requests.
type Conductor struct {
	// Threshold is by what factor the best prefix must be longer than that of an instance for the
	// rest to be copied there (the paper's kvcache_balancing_threshold): up to 1 whenever it is
	// longer, +Inf never.
	Threshold float64
	// TTFT and TBT are the longest times to the first token and between two tokens that a request
	// may have; 0: any.
	TTFT, TBT time.Duration
}

// Placement is where a request goes, and why.
type Placement struct {
	Prefill, Decode int
	// From is the instance from which Copied tokens are to be copied to Prefill; -1: none.
	From, Copied int
	Cached       int // tokens that need no computing, Copied among them

	Transfer, Queue, Compute time.Duration
	TTFT                     time.Duration // their sum
	TBT                      time.Duration
}

// ErrNoInstance says that there is no prefill or no decode instance.
var ErrNoInstance = errors.New("no instance")

// RefusedError is a request that would come too late.
type RefusedError struct {
	What        string // "TTFT" or "TBT"
	Time, Limit time.Duration
}

// Error says what the caller may do about it.
func (e *RefusedError) Error() string {
	if e.Time == Never {
		return "refused: no decode instance has room: try again later"
	}
	return fmt.Sprintf("refused: %s would be %v, more than %v: try again later", e.What, e.Time,
		e.Limit)
}

// Place chooses the instances of a request. The error is a *RefusedError when a limit would be
// broken, or wraps ErrNoInstance; the Placement says how near it came.
func (c *Conductor) Place(p Prefill, d Decode) (Placement, error) {
	if p.Len() == 0 || d.Len() == 0 {
		return Placement{}, fmt.Errorf("place: %d prefill and %d decode: %w", p.Len(), d.Len(),
			ErrNoInstance)
	}
	cached, best := make([]int, p.Len()), 0
	for i := range cached {
		cached[i] = p.Cached(i)
		best = max(best, cached[i])
	}
	chosen := Placement{TTFT: -1, TBT: -1}
	for i, has := range cached {
		t := Placement{Prefill: i, From: -1, Cached: has}
		if best > has && float64(best)/float64(has) > c.Threshold {
			t.Cached, t.Copied = best, best-has
			for from, prefix := range cached {
				if prefix < best {
					continue
				}
				// Of several that have all of it the one is asked that is there soonest.
				if took := p.Transfer(from, i, t.Copied); t.From < 0 || took < t.Transfer {
					t.From, t.Transfer = from, took
				}
			}
		}
		t.Queue, t.Compute = p.Queue(i), p.Compute(i, t.Cached)
		t.TTFT = sum(t.Transfer, t.Queue, t.Compute)
		if chosen.TTFT < 0 || t.TTFT < chosen.TTFT {
			chosen = t
		}
	}
	chosen.TBT = -1
	for i := range d.Len() {
		if step := d.Step(i); chosen.TBT < 0 || step < chosen.TBT {
			chosen.Decode, chosen.TBT = i, step
		}
	}
	switch {
	case c.TTFT > 0 && chosen.TTFT > c.TTFT:
		return chosen, &RefusedError{"TTFT", chosen.TTFT, c.TTFT}
	case c.TBT > 0 && chosen.TBT > c.TBT, chosen.TBT == Never:
		return chosen, &RefusedError{"TBT", chosen.TBT, c.TBT}
	}
	return chosen, nil
}

// sum adds times that are not below 0, up to Never.
func sum(times ...time.Duration) (all time.Duration) {
	for _, t := range times {
		if t > Never-all {
			return Never
		}
		all += t
	}
	return all
}

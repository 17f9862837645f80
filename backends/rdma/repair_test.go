// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"slices"
	"testing"
	"time"
)

// plan is a repair at the time that a test says it is.
type plan struct {
	*repair
	now time.Time
}

func newPlan(pairs int) *plan {
	cfg := Config{Timeout: 4 * time.Millisecond, Retries: 1, Grace: 200 * time.Millisecond,
		Failure: time.Second}
	cfg.EnsureDefaults()
	c := &plan{now: time.Unix(1000, 0)}
	c.repair = newRepair(pairs, &cfg)
	c.begun(c.now)
	return c
}

func (c *plan) after(d time.Duration) { c.now = c.now.Add(d) }

func (c *plan) want(t *testing.T, what string, pairs ...int) {
	t.Helper()
	if got := c.asks(c.now); !slices.Equal(got, pairs) {
		t.Errorf("%s: asks for %v, want %v", what, got, pairs)
	}
	if why := c.lost(c.now); why != "" {
		t.Errorf("%s: lost, %s", what, why)
	}
}

// again fails a queue pair and has the owner answer.
func (c *plan) answer(t *testing.T, pair int, there bool) {
	t.Helper()
	if !c.answered(pair, c.pairs[pair].attempt, there, c.now) {
		t.Errorf("queue pair %d: the answer was not waited for", pair)
	}
}

func TestRepairPauses(t *testing.T) {
	c := newPlan(2)
	c.live(0, c.now)
	c.live(1, c.now)
	c.failed(1, false, c.now)
	pauses := []time.Duration{0, 50, 100, 200, 400, 800, 1000, 1000}
	for i, pause := range pauses {
		pause *= time.Millisecond
		if pause > 0 {
			c.after(pause - time.Millisecond)
			c.want(t, "before the pause is over")
			if at := c.next(); at.Before(c.now) || at.After(c.now.Add(3*time.Millisecond)) {
				t.Errorf("failure %d: to look again in %v", i, at.Sub(c.now))
			}
			c.after(time.Millisecond)
		}
		c.want(t, "after the pause", 1)
		if i%2 == 0 {
			c.answer(t, 1, true)
			c.failed(1, false, c.now) // the probe
		} else {
			c.answer(t, 1, false)
		}
	}
	c.endPauses(c.now)
	c.want(t, "when a port came up", 1)
	c.answer(t, 1, true)
	c.live(1, c.now)
	c.after(time.Hour)
	c.want(t, "live again")
}

func TestRepairStaleNews(t *testing.T) {
	c := newPlan(1)
	c.live(0, c.now)
	c.failed(0, false, c.now)
	c.want(t, "failed", 0)
	if c.answered(0, 0, true, c.now) || c.answered(0, 2, true, c.now) ||
		c.answered(1, 1, true, c.now) {
		t.Error("an answer to what was not asked is taken")
	}
	c.live(0, c.now)
	c.failed(0, false, c.now)
	if c.pairs[0].state != pairAsked {
		t.Errorf("news of a queue pair that is no more made it %v", c.pairs[0].state)
	}
	c.answer(t, 0, true)
	if c.answered(0, 1, true, c.now) {
		t.Error("an answer is taken twice")
	}
}

// TestRepairBearsFlaps has the only queue pair fail for ever, but move bytes each time.
func TestRepairBearsFlaps(t *testing.T) {
	c := newPlan(1)
	for range 1000 {
		c.live(0, c.now)
		c.after(11 * time.Millisecond)
		c.failed(0, true, c.now)
		c.asks(c.now)
		if why := c.lost(c.now); why != "" {
			t.Fatalf("lost, %s", why)
		}
		c.answered(0, c.pairs[0].attempt, true, c.now)
	}
}

// TestRepairBears has a queue pair that is sound stay with one that is not, for as long as it
// takes.
func TestRepairBears(t *testing.T) {
	c := newPlan(2)
	c.live(0, c.now)
	c.live(1, c.now)
	for range 2000 {
		c.after(11 * time.Millisecond)
		c.failed(1, false, c.now)
		c.asks(c.now)
		if why := c.lost(c.now); why != "" {
			t.Fatalf("lost, %s", why)
		}
		c.answered(1, c.pairs[1].attempt, true, c.now)
		c.live(1, c.now)
	}
	if c.remove(1, c.now); c.lost(c.now) != "" {
		t.Error("lost with a queue pair that is live")
	}
}

// TestRepairPorts has a port be down for so short a time that its queue pair bears it, and for as
// long as a NIC would have tried.
func TestRepairPorts(t *testing.T) {
	c := newPlan(2)
	c.live(0, c.now)
	c.live(1, c.now)
	c.after(time.Hour)
	c.want(t, "sound")
	for range 10 {
		c.port(1, false, c.now)
		c.after(c.downMax / 2)
		c.port(1, false, c.now)
		if c.failsByPort(1, c.now) {
			t.Fatal("an outage that is short is not borne")
		}
		c.port(1, true, c.now)
		if !c.next().IsZero() {
			t.Fatal("looks again although all is well")
		}
	}
	c.port(1, false, c.now)
	if wait := c.next().Sub(c.now); wait < c.downMax || wait > c.downMax+2*time.Millisecond {
		t.Errorf("to look again in %v", wait)
	}
	c.after(c.downMax)
	if c.failsByPort(0, c.now) || !c.failsByPort(1, c.now) {
		t.Error("the queue pair whose port is down has not failed, or another has")
	}
	c.failed(1, false, c.now)
	if c.failsByPort(1, c.now) {
		t.Error("a queue pair that is no more fails again")
	}
}

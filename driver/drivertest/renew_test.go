// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// unguarded is memory into which nobody has to enter.
type unguarded struct{ driver.Shared }

func (unguarded) Enter()         {}
func (unguarded) TryEnter() bool { return true }
func (unguarded) Leave()         {}

// clinging is memory that who has entered leaves only after the next has entered.
type clinging struct {
	driver.Shared
	inside atomic.Bool
}

func (c *clinging) Leave() {
	if c.inside.Swap(true) {
		c.Shared.Leave()
	}
}

// hasty is memory that is left before the bytes land, or not entered at all. A Renew begins at once
// then, and the bytes come at another moment of it each time.
type hasty struct {
	driver.Shared
	outside bool // it is not entered
	times   atomic.Int64
}

func (h *hasty) Enter() {
	if !h.outside {
		h.Shared.Enter()
	}
	h.leave()
}

func (h *hasty) TryEnter() bool {
	if h.outside {
		h.leave()
		return true
	}
	ok := h.Shared.TryEnter()
	if ok {
		h.leave()
	}
	return ok
}

func (h *hasty) leave() {
	if !h.outside {
		h.Shared.Leave()
	}
	go func() { _ = h.Renew(context.Background(), 0, 4<<20) }()
	time.Sleep(time.Duration(h.times.Add(1)%16) * 100 * time.Microsecond)
}

func (h *hasty) Leave() {}

// TestRenewChecksNotice a backend that lands while other pages are put there, and one that keeps
// them from being put.
func TestRenewChecksNotice(t *testing.T) {
	for _, m := range []struct {
		misdeed, check string
		late           bool // the finding is that something takes too long
		wrap           func(driver.Shared) driver.Shared
	}{
		{"does not enter", "RenewUnderReads", false, func(s driver.Shared) driver.Shared {
			return unguarded{s}
		}},
		{"leaves early", "RenewUnderReads", false, func(s driver.Shared) driver.Shared {
			return &hasty{Shared: s}
		}},
		{"does not enter", "RenewUnderWrites", true, func(s driver.Shared) driver.Shared {
			return &hasty{Shared: s, outside: true}
		}},
		{"does not leave", "RenewEnds", true, func(s driver.Shared) driver.Shared {
			return &clinging{Shared: s}
		}},
	} {
		t.Run(m.check+" "+m.misdeed, func(t *testing.T) {
			h := sabotaged(sabotage{register: func(b *saboteur, seg driver.Segment) (driver.Memory,
				error) {
				if seg.Shared != nil {
					seg.Shared = m.wrap(seg.Shared)
				}
				return b.Backend.Register(seg)
			}})
			h.Local, h.Limit = HostMemory, 20*time.Second
			if m.late {
				h.Limit = 2 * time.Second
			}
			notices(t, find(t, m.check), h, Pair)
		})
	}
}

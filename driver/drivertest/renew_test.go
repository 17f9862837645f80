// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
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

// TestRenewChecksNotice a backend that lands while other pages are put there, and one that keeps
// them from being put.
func TestRenewChecksNotice(t *testing.T) {
	for name, wrap := range map[string]func(driver.Shared) driver.Shared{
		"RenewUnderReads": func(s driver.Shared) driver.Shared { return unguarded{s} },
		"RenewEnds":       func(s driver.Shared) driver.Shared { return &clinging{Shared: s} },
	} {
		t.Run(name, func(t *testing.T) {
			h := sabotaged(sabotage{register: func(b *saboteur, seg driver.Segment) (driver.Memory,
				error) {
				if seg.Shared != nil {
					seg.Shared = wrap(seg.Shared)
				}
				return b.Backend.Register(seg)
			}})
			h.Local, h.Limit = HostMemory, 20*time.Second
			notices(t, find(t, name), h, Pair)
		})
	}
}

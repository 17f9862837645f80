// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
)

// spots are those of all backends of this process that withSpots opens.
var spots, spotsErr = ucp.NewSpots()

var spotNames = map[string]int{"store": ucp.AtStore, "stored": ucp.AtStored}

func parkAt(name string, f func()) {
	if f == nil {
		spots.Park(ucp.AtNone)
		return
	}
	spots.Park(spotNames[name])
	go func() {
		if spots.Await() == nil {
			f()
			_ = spots.Leave() // a pipe of ours
		}
	}()
}

// withSpots is New with spots.
func withSpots(cfg Config) (driver.Backend, error) {
	if spotsErr != nil {
		return nil, spotsErr
	}
	load := func(c *Config) error { return ucp.Load(c.Library) }
	return open(cfg, load, func(c ucp.Config) (fabric, error) {
		c.Spots = spots
		return openUCX(c)
	})
}

// A thread of C that stands holds the lock of its worker, and so all other movers of the worker.
// One of an owner holds up a fence whatever its context says, so the suite parks none there; see
// TestFenceWhileALandingStands of csrc/ucx.
func init() {
	newSpotted = withSpots
	directHarness.Park, directHarness.Halts = parkAt, []string{"store", "stored"}
}

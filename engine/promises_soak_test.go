// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"flag"
	"maps"
	"testing"
	"time"

	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/driver"
)

var (
	promisesSeed = flag.Uint64("fault.seed", 0, "of the run of promises under faults; 0: "+
		"by the clock")
	promisesFor = flag.Duration("fault.for", 8*time.Second,
		"how long that run is, for each backend")
)

// TestSoakPromisesUnderFaults is TestPromisesUnderFaults for as long as one likes, each time with
// other choices, and over a tcp that soon asks about what is old.
func TestSoakPromisesUnderFaults(t *testing.T) {
	seed := *promisesSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	backends := maps.Clone(promisesBackends)
	backends["tcp"] = func() (driver.Backend, error) {
		return tcp.New(tcp.Config{Plaintext: true, Listen: "127.0.0.1:0",
			Grace: 20 * time.Millisecond, CloseMax: 100 * time.Millisecond})
	}
	for name, open := range backends {
		t.Run(name, func(t *testing.T) {
			t.Logf("again with: go test ./engine -run %s -fault.seed %d -fault.for %v", t.Name(),
				seed, *promisesFor)
			promisesUnderFaults(t, open, seed, runLength{time: *promisesFor})
		})
	}
}

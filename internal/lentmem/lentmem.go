// SPDX-License-Identifier: Apache-2.0

// Package lentmem knows which device memory of this process other processes map. A revoke against
// one that is frozen puts other memory under the addresses (backends/cuda, Config.Peers), which a
// device that was told of the memory before would not see: it would go on with the old.
package lentmem

import (
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/driver"
)

var (
	mu   sync.RWMutex
	lent = map[uint64]uint64{} // address to length
)

// Add lists a range, before another process can map it.
func Add(at, n uint64) {
	mu.Lock()
	lent[at] = n
	mu.Unlock()
}

// Remove ends Add, before the range is freed.
func Remove(at uint64) {
	mu.Lock()
	delete(lent, at)
	mu.Unlock()
}

// Check returns driver.ErrNotSupported for a range that overlaps one that is listed. A backend asks
// whose device, or library, is to know the memory itself.
func Check(at, n uint64) error {
	mu.RLock()
	defer mu.RUnlock()
	for from, size := range lent {
		if at < from+size && from < at+n {
			return fmt.Errorf("register device memory at %#x that other processes map "+
				"(Config.Peers of the cuda backend): a revoke may put other memory there, which "+
				"would not be noticed here: %w", at, driver.ErrNotSupported)
		}
	}
	return nil
}

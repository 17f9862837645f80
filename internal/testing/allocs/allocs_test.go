// SPDX-License-Identifier: Apache-2.0

package allocs

import "testing"

var sink []byte

// TestPerRun: what others allocate in one window is not f's, and what f allocates is in all.
func TestPerRun(t *testing.T) {
	if n := PerRun(10, func() { sink = make([]byte, 64) }); n != 1 {
		t.Errorf("%v allocations, want 1", n)
	}
	calls := 0
	if n := PerRun(10, func() {
		if calls++; calls < 12 { // the first window, with the call that warms up
			sink = make([]byte, 64)
		}
	}); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}

// SPDX-License-Identifier: Apache-2.0

package ring

import (
	"testing"
	"unsafe"

	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestArmBesideAnEnd arms while the other side ends a batch, as C does it: either Arm finds the
// end, or the end finds the flag.
func TestArmBesideAnEnd(t *testing.T) {
	mem := testkit.MemoryOutsideGo(t, 4096)
	at := func(off int) unsafe.Pointer { return unsafe.Pointer(&mem[off]) }
	r := New(at(0), at(8), at(1024), at(1028), at(1032), at(1036), at(2048), 64)
	end := func() (wakes bool) {
		r.Head.Add(1)
		return r.Armed.Swap(0) != 0
	}
	done := make([]Done, 2)
	testkit.OneSideSees(t, r.Arm, end, func() {
		r.Armed.Store(0)
		if n := r.Poll(done); n != 1 {
			t.Fatalf("%d ends, want 1", n)
		}
	})
}

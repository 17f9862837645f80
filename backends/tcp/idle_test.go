// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"runtime"
	"runtime/debug"
)

// settleMemory gives back what is not in use, stacks included.
func settleMemory() {
	for range 3 {
		runtime.GC()
	}
	debug.FreeOSMemory()
}

// heapAndStacks is what this process uses.
func heapAndStacks() uint64 {
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return s.HeapInuse + s.StackInuse
}

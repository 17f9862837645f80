// SPDX-License-Identifier: Apache-2.0

package copy

import (
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
)

// Way is how a batch is copied: runs of at least so many bytes with stores past the caches, shorter
// ones by libc's memcpy. Without cgo all are copied by Go's copy.
type Way uint64

// Plain copies all runs by memcpy.
const Plain Way = math.MaxUint64

const (
	streamRun = 16 << 10 // 16 KiB: shorter runs gain nothing from it
	// The smallest batch that may be streamed, and the one that is whatever the cache: others use
	// it as well, and a virtual machine sees all of one of which it has a part.
	streamBatchMin = 1 << 20  // 1 MiB
	streamBatchMax = 16 << 20 // 16 MiB
)

// streamBatch is the smallest batch that is streamed. One of less than a third of the last-level
// cache leaves room in it for more than its source and its destination: then memcpy is as fast, and
// the program finds the bytes in the cache.
var streamBatch = sync.OnceValue(func() uint64 {
	return smallestStreamed(lastLevel("/sys/devices/system/cpu/cpu0/cache"))
})

func smallestStreamed(cache uint64) uint64 {
	return min(max(cache/3, streamBatchMin), streamBatchMax)
}

// From which size batches may be streamed, and runs of them: StreamAll lowers both.
var (
	batchMin uint64 = streamBatchMin
	runMin   Way    = streamRun
)

// StreamAll is for tests of what stands around a copy: every run is streamed until restore is
// called. Neither call may be made beside a copy.
func StreamAll() (restore func()) {
	chosen := streamBatch
	batchMin, runMin, streamBatch = 0, 1, func() uint64 { return 0 }
	return func() { batchMin, runMin, streamBatch = streamBatchMin, streamRun, chosen }
}

// For is the way of a batch, or of all batches of one transfer, of so many bytes. Parallel calls
// are allowed.
func For(batch uint64) Way {
	if !streams || batch < batchMin || batch < streamBatch() {
		return Plain
	}
	return runMin
}

// Copy copies one run within this process. The ranges do not overlap. A fault panics, as in Go: see
// hostmem.CatchFault.
func (w Way) Copy(dst, src []byte) {
	if uint64(len(src)) < uint64(w) {
		copy(dst, src) // without a crossing into C
		return
	}
	stream(dst, src)
}

// unknownCache stands for the cache of a machine whose kernel does not tell its size.
const unknownCache = 32 << 20 // 32 MiB

// lastLevel is the size of the largest cache of a processor, by its directory in sysfs.
func lastLevel(dir string) (bytes uint64) {
	files, _ := filepath.Glob(filepath.Join(dir, "index*", "size")) // its error is a bad pattern
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		number, ok := strings.CutSuffix(strings.TrimSpace(string(text)), "K")
		if n, err := strconv.ParseUint(number, 10, 32); ok && err == nil {
			bytes = max(bytes, n<<10)
		}
	}
	if bytes == 0 {
		return unknownCache
	}
	return bytes
}

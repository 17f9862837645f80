// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// faultStep is what a thread takes at a time: whole huge pages, and few enough bytes that
// all threads end at about the same time.
const faultStep = 16 << 20

// FaultIn finds the pages of memory that is about to be pinned: the pinning finds them
// one by one on one thread, and most of the time goes into zeroing them. It takes so many
// threads, and returns when all is there. Contents do not change. write is for memory that
// will be pinned to be written to. What cannot be done is left to the pinning,
// and told by them; before Linux 5.14 that is everything.
func FaultIn(mem []byte, write bool, threads int) {
	advice := unix.MADV_POPULATE_READ
	if write {
		advice = unix.MADV_POPULATE_WRITE
	}
	mem = wholePages(mem)
	parts := partsOf(mem)
	var next, failed atomic.Int64
	work := func() {
		for failed.Load() == 0 {
			part := parts.at(mem, next.Add(1)-1)
			if part == nil {
				return
			}
			if retry(func() error { return unix.Madvise(part, advice) }) != nil {
				failed.Store(1)
			}
		}
	}
	var others sync.WaitGroup
	for range min(threads, int(parts.count)) - 1 {
		others.Go(work)
	}
	work()
	others.Wait()
}

// wholePages leaves out those at the edges that lie within in part.
func wholePages(mem []byte) []byte {
	head := -uint64(address(mem)) & (basePage - 1)
	if uint64(len(mem)) < head+basePage {
		return nil
	}
	mem = mem[head:]
	return mem[:roundDown(uint64(len(mem)), basePage)]
}

// parts cuts memory at addresses that are multiples of faultStep, so that no huge page is
// two threads'.
type parts struct {
	before int64 // bytes of the first step that lie before the memory
	count  int64
}

func partsOf(mem []byte) parts {
	before := int64(address(mem) % faultStep)
	return parts{before, (before + int64(len(mem)) + faultStep - 1) / faultStep}
}

// at returns part i; nil: there is none.
func (p parts) at(mem []byte, i int64) []byte {
	if i >= p.count || len(mem) == 0 {
		return nil
	}
	from, to := i*faultStep-p.before, (i+1)*faultStep-p.before
	return mem[max(from, 0):min(to, int64(len(mem)))]
}

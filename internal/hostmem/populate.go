// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// populateStep is how many bytes one call faults in. A call takes some 30 ms in the kernel. A lack
// of memory is noticed after at most so many bytes.
const populateStep = 64 << 20

// advise tells the kernel how the range is used. Errors are ignored: it is advice.
func (b *Buffer) advise(mem []byte) {
	_ = unix.Madvise(mem, unix.MADV_DONTDUMP) // a core file of the KV cache is of no help
	if b.opts.Huge != HugeNone && b.page != HugeSize {
		_ = unix.Madvise(mem, unix.MADV_HUGEPAGE)
	}
}

// collapses reports whether populate should collapse the base pages of a layer to huge pages.
func (b *Buffer) collapses(l *layer) bool { return b.opts.Huge != HugeNone && !l.huge }

// populate faults the range in, step by step, so that a lack of memory is an error, and neither a
// SIGBUS later nor a machine without memory. With gather it collapses each step to huge pages;
// gathered reports whether that succeeded for all steps.
func populate(mem []byte, l *layer, off uint64, gather bool) (gathered bool, err error) {
	gathered = gather && uint64(len(mem)) >= HugeSize
	for done := uint64(0); done < uint64(len(mem)); {
		n := min(populateStep, uint64(len(mem))-done)
		step := mem[done : done+n]
		if gathered {
			gathered = Gather(step, 1)
		}
		if err := faultIn(step, l, off+done); err != nil {
			return false, populateError(err, done, uint64(len(mem)))
		}
		done += n
	}
	return gathered, nil
}

func populateError(err error, done, n uint64) error {
	if errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.EFAULT) || errors.Is(err, unix.ENOSPC) {
		return tooLittle(n, done)
	}
	return fmt.Errorf("populate %d bytes: %w", n, err)
}

func faultIn(mem []byte, l *layer, off uint64) error {
	err := retry(func() error { return unix.Madvise(mem, unix.MADV_POPULATE_WRITE) })
	if err == unix.EINVAL { // before Linux 5.14
		err = retry(func() error { return unix.Fallocate(l.fd, 0, int64(off), int64(len(mem))) })
		return os.NewSyscallError("fallocate", err)
	}
	return os.NewSyscallError("madvise(MADV_POPULATE_WRITE)", err)
}

// Gather collapses each whole 2 MiB of shared memory to a huge page, on that many threads, and
// reports whether all are huge now. The address and the offset in the file must be multiples of
// 2 MiB.
//
// It uses MADV_COLLAPSE (Linux 6.1). That works even if shmem_enabled allows no huge pages at a
// page fault, unless shmem_enabled is "deny". It needs at least one page in each 2 MiB, so Gather
// first faults in the first one. The kernel zeroes pages that are not there yet, and copies those
// that are, which takes some ten times as long.
func Gather(mem []byte, threads int) bool {
	mem = mem[:roundDown(uint64(len(mem)), HugeSize)]
	return inParts(mem, threads, func(part []byte) bool {
		for left := part; len(left) > 0; left = left[HugeSize:] {
			first := left[:basePage]
			if retry(func() error { return unix.Madvise(first, unix.MADV_POPULATE_WRITE) }) != nil {
				return false
			}
		}
		return retry(func() error { return unix.Madvise(part, unix.MADV_COLLAPSE) }) == nil
	})
}

// retry calls f again, up to 8 times in all, while a signal or a busy page makes it fail.
func retry(f func() error) (err error) {
	for range 8 {
		if err = f(); err != unix.EINTR && err != unix.EAGAIN {
			break
		}
	}
	return err
}

// faultStep is how many bytes a thread handles at a time: whole huge pages, and so few that all
// threads end at about the same time.
const faultStep = 16 << 20

// FaultIn faults in the pages of memory that is about to be pinned, on that many threads, and
// returns when they are there. The contents do not change. Pinning itself would fault them in one
// by one on one thread, mostly zeroing pages. write is true if the memory will be pinned for
// writes. FaultIn reports no errors: pages that it could not fault in, before Linux 5.14 all of
// them, are left to the pinning, which reports them.
func FaultIn(mem []byte, write bool, threads int) {
	advice := unix.MADV_POPULATE_READ
	if write {
		advice = unix.MADV_POPULATE_WRITE
	}
	inParts(wholePages(mem), threads, func(part []byte) bool {
		return retry(func() error { return unix.Madvise(part, advice) }) == nil
	})
}

// inParts calls do with each part of memory, on that many threads. It stops when a call returns
// false, and reports whether none did.
func inParts(mem []byte, threads int, do func(part []byte) bool) bool {
	parts := partsOf(mem)
	var next atomic.Int64
	var failed atomic.Bool
	work := func() {
		for !failed.Load() {
			part := parts.at(mem, next.Add(1)-1)
			if part == nil {
				return
			}
			if !do(part) {
				failed.Store(true)
			}
		}
	}
	var others sync.WaitGroup
	for range min(threads, int(parts.count)) - 1 {
		others.Go(work)
	}
	work()
	others.Wait()
	return !failed.Load()
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

// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// populateStep is how much is faulted in by one call: the thread is in the
// kernel for some 30 ms, and memory runs out by 64 MiB at most too late.
const populateStep = 64 << 20

// advise tells the kernel how the range is used; all of it may fail.
func (b *Buffer) advise(mem []byte) {
	_ = unix.Madvise(mem, unix.MADV_DONTDUMP) // a core file of the KV cache is of no help
	if b.opts.Huge != HugeNone && b.page != hugeSize {
		_ = unix.Madvise(mem, unix.MADV_HUGEPAGE)
	}
}

// collapses reports whether base pages of a layer should be gathered.
func (b *Buffer) collapses(l *layer) bool { return b.opts.Huge != HugeNone && !l.huge }

// populate faults the range in by steps, so that a lack of memory is an error
// and neither SIGBUS nor a full machine. It gathers each step in huge pages if
// asked: MADV_COLLAPSE works also where shmem_enabled forbids them at fault
// time, but only on pages that are there. It reports whether all were gathered.
func populate(mem []byte, l *layer, off uint64, gather bool) (gathered bool, err error) {
	gathered = gather && uint64(len(mem)) >= hugeSize
	for done := uint64(0); done < uint64(len(mem)); {
		n := min(populateStep, uint64(len(mem))-done)
		step := mem[done : done+n]
		if err := faultIn(step, l, off+done); err != nil {
			return false, populateError(err, done, uint64(len(mem)))
		}
		if gathered {
			gathered = collapse(step)
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

// collapse gathers every whole 2 MiB of the range.
func collapse(mem []byte) bool {
	whole := roundDown(uint64(len(mem)), hugeSize)
	if whole == 0 {
		return true
	}
	return retry(func() error { return unix.Madvise(mem[:whole], unix.MADV_COLLAPSE) }) == nil
}

// retry repeats what a signal or a busy page may end early, a few times.
func retry(f func() error) (err error) {
	for range 8 {
		if err = f(); err != unix.EINTR && err != unix.EAGAIN {
			break
		}
	}
	return err
}

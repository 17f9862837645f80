// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Count adds memory of another make to InUse, in whole pages, until end
// is called. end is idempotent.
func Count(purpose string, n uint64) (end func()) {
	size := int64(roundUp(n, basePage))
	count(purpose, size)
	return sync.OnceFunc(func() { count(purpose, -size) })
}

// Populate faults in memory of another make: it begins at a page and is
// zeroed still. A lack of memory is a *SizeError.
func Populate(mem []byte) error {
	if err := checkFree(uint64(len(mem))); err != nil {
		return err
	}
	for done := 0; done < len(mem); done += populateStep {
		step := mem[done:min(done+populateStep, len(mem))]
		if err := touch(step); err != nil {
			return populateError(err, uint64(done), uint64(len(mem)))
		}
	}
	return nil
}

// touch makes pages that can be written to, by hand where the kernel has no call
// for it.
func touch(mem []byte) error {
	err := retry(func() error { return unix.Madvise(mem, unix.MADV_POPULATE_WRITE) })
	if err == unix.EINVAL { // before Linux 5.14
		for i := 0; i < len(mem); i += int(basePage) {
			mem[i] = 0
		}
		return nil
	}
	return os.NewSyscallError("madvise(MADV_POPULATE_WRITE)", err)
}

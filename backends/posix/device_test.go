// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"fmt"
	"os"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/machine"
)

// needs skips a test for what the machine, or the user, lacks.
func needs(t testing.TB, reason string) {
	t.Helper()
	drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "posix", Reason: reason,
		Fix: "run the test as root"})
}

func TestBlockDevice(t *testing.T) {
	const size = 192 << 20
	device, _ := machine.LoopDevice(t, machine.DiskFile(t, size))
	for _, v := range []struct {
		name string
		cfg  Config
		off  uint64
	}{{"ring", Config{Path: PathRing}, 0}, {"threads-odd", Config{Path: PathThreads}, 777}} {
		t.Run(v.name, func(t *testing.T) {
			h := harness(v.name, v.cfg, deviceMemory(device, size, v.off))
			h.Only = drivertest.Moving
			drivertest.Run(t, h)
		})
	}
	f, err := Open(device, OpenOptions{})
	require.NoError(t, err)
	defer f.Close()
	require.EqualValues(t, size, f.Segment().Len, "bytes of a device")
	require.Error(t, f.Grow(2*size), "a device has grown")
}

// deviceMemory makes memory that is ranges of one block device of that size, each at off of a unit.
// What was freed is used again only when none of it is in use.
func deviceMemory(path string, size, off uint64) drivertest.Allocator {
	const unit = 64 << 10
	var mu sync.Mutex
	var used, next uint64
	return func(n uint64) (*drivertest.Space, error) {
		mu.Lock()
		defer mu.Unlock()
		if used == 0 {
			next = 0
		}
		at, whole := next+off, (off+n+unit-1)&^(unit-1)
		if next+whole > size {
			return nil, fmt.Errorf("%s: %d bytes at %d do not fit in %d", path, whole, next, size)
		}
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			return nil, err
		}
		next, used = next+whole, used+1
		s := drivertest.FileSpace(f, at, n, func() error {
			mu.Lock()
			defer mu.Unlock()
			used--
			return f.Close()
		})
		s.Bytes = deviceBytes{s.Bytes, f}
		return s, nil
	}
}

// deviceBytes is memory of a block device. Where ReadAt meets bytes that io_uring is just writing
// past the page cache, the kernel keeps the old ones in the cache for good: it drops them as a
// write begins, and as one ends that a system call waited for, but not as one of io_uring ends. So
// ReadAt drops them first.
type deviceBytes struct {
	drivertest.Bytes
	f *os.File
}

func (b deviceBytes) ReadAt(p []byte, off int64) (int, error) {
	if err := unix.Fadvise(int(b.f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		return 0, fmt.Errorf("drop what is cached of the device: %w", err)
	}
	return b.Bytes.ReadAt(p, off)
}

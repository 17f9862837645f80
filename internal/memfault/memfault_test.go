// SPDX-License-Identifier: Apache-2.0

package memfault

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// TestCopy copies into and out of memory whose second page is not there.
func TestCopy(t *testing.T) {
	page := os.Getpagesize()
	mem, err := unix.Mmap(-1, 0, 2*page, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANON)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Munmap(mem)) }()
	require.NoError(t, unix.Mprotect(mem[page:], unix.PROT_NONE))
	mine := make([]byte, 2*page)
	for range 3 {
		_, err = Copy(mine, mem)
		require.ErrorIs(t, err, driver.ErrFault)
		_, err = Copy(mem[page-1:], mine)
		require.ErrorIs(t, err, driver.ErrFault)
		n, err := Copy(mem[:page], mine)
		require.NoError(t, err)
		require.Equal(t, page, n)
	}
}

// TestOtherPanics: Catch lets all go on that is no fault of memory, and leaves the goroutine as it
// was.
func TestOtherPanics(t *testing.T) {
	wrong := func() (err error) {
		defer Catch(&err, Begin())
		var none *[4]int
		return os.NewSyscallError("", unix.Errno(none[2]))
	}
	require.Panics(t, func() { _ = wrong() })
	require.False(t, Begin(), "faults of this goroutine go on to panic")
	require.True(t, Begin())
}

// BenchmarkCopy compares it with copy.
func BenchmarkCopy(b *testing.B) {
	dst, src := make([]byte, 64), make([]byte, 64)
	b.Run("copy", func(b *testing.B) {
		for range b.N {
			copy(dst, src)
		}
	})
	b.Run("Copy", func(b *testing.B) {
		for range b.N {
			_, _ = Copy(dst, src)
		}
	})
}

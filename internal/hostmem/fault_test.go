// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// TestCopyCatchingFault copies into and out of memory whose second page is not there.
func TestCopyCatchingFault(t *testing.T) {
	page := os.Getpagesize()
	mem, err := unix.Mmap(-1, 0, 2*page, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANON)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Munmap(mem)) }()
	require.NoError(t, unix.Mprotect(mem[page:], unix.PROT_NONE))
	mine := make([]byte, 2*page)
	for range 3 {
		_, err = CopyCatchingFault(mine, mem)
		require.ErrorIs(t, err, driver.ErrFault)
		_, err = CopyCatchingFault(mem[page-1:], mine)
		require.ErrorIs(t, err, driver.ErrFault)
		n, err := CopyCatchingFault(mem[:page], mine)
		require.NoError(t, err)
		require.Equal(t, page, n)
	}
}

// TestCatchFaultLetsOtherPanicsGoOn: CatchFault lets all go on that is no fault of memory, and
// leaves the goroutine as it was.
func TestCatchFaultLetsOtherPanicsGoOn(t *testing.T) {
	wrong := func() (err error) {
		defer CatchFault(&err, PanicOnFault())
		var none *[4]int
		return os.NewSyscallError("", unix.Errno(none[2]))
	}
	require.Panics(t, func() { _ = wrong() })
	require.False(t, PanicOnFault(), "faults of this goroutine go on to panic")
	require.True(t, PanicOnFault())
}

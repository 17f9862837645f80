// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

func TestCountOtherMemory(t *testing.T) {
	end := Count("other", 4097)
	if got := InUse()["other"]; got != 2*basePage {
		t.Errorf("%d bytes in use, want two pages", got)
	}
	end()
	end()
	if got, ok := InUse()["other"]; ok {
		t.Errorf("%d bytes in use after the end", got)
	}
}

// TestPopulateOtherMemory looks at the page faults that are left for later.
func TestPopulateOtherMemory(t *testing.T) {
	const pages = 8192
	mem, err := unix.Mmap(-1, 0, pages*int(basePage), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED|unix.MAP_ANON)
	require.NoError(t, err)
	defer unix.Munmap(mem)
	require.NoError(t, Populate(mem[:len(mem)-1]))
	before := faults(t)
	for i := 0; i < len(mem); i += int(basePage) {
		mem[i] = 1
	}
	if n := faults(t) - before; n > pages/8 {
		t.Errorf("%d page faults for %d pages that should be there", n, pages)
	}
}

func faults(t *testing.T) int64 {
	t.Helper()
	var use unix.Rusage
	require.NoError(t, unix.Getrusage(unix.RUSAGE_SELF, &use))
	return use.Minflt
}

func TestPopulateMoreThanThereIs(t *testing.T) {
	total := Limits().Total
	mem, err := unix.Mmap(-1, 0, int(total)+1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|
		unix.MAP_ANON|unix.MAP_NORESERVE)
	require.NoError(t, err)
	defer unix.Munmap(mem)
	if err := Populate(mem); !errors.Is(err, driver.ErrBounds) {
		t.Errorf("%v, want %v", err, driver.ErrBounds)
	}
}

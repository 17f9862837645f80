// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

func TestCheckNotLent(t *testing.T) {
	AddLent(4096, 4096)
	for _, r := range [][2]uint64{{4096, 1}, {8191, 1}, {0, 4097}, {0, 1 << 20}, {5000, 10}} {
		require.ErrorIs(t, CheckNotLent(r[0], r[1]), driver.ErrNotSupported, "%v", r)
	}
	for _, r := range [][2]uint64{{0, 4096}, {8192, 4096}} {
		require.NoError(t, CheckNotLent(r[0], r[1]), "%v", r)
	}
	RemoveLent(4096)
	require.NoError(t, CheckNotLent(4096, 4096))
}

func TestDupDMABuf(t *testing.T) {
	fd, err := unix.MemfdCreate("dma-buf", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	given := &driver.DMABuf{FD: fd, Offset: 4096}
	own, err := DupDMABuf(given)
	require.NoError(t, err)
	if own.FD == fd || own.Offset != 4096 {
		t.Errorf("%+v of %+v", own, given)
	}
	if flags, err := unix.FcntlInt(uintptr(own.FD), unix.F_GETFD, 0); err != nil ||
		flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("descriptor flags %#x, %v: want close-on-exec", flags, err)
	}
	require.NoError(t, CloseDMABuf(given))
	if _, err := DupDMABuf(given); !errors.Is(err, driver.ErrBounds) ||
		!errors.Is(err, unix.EBADF) {
		t.Errorf("a descriptor that is closed: %v", err)
	}
	require.NoError(t, unix.Ftruncate(own.FD, 1), "the other one")
	require.NoError(t, CloseDMABuf(own))
	if own, err := DupDMABuf(nil); own != nil || err != nil || CloseDMABuf(own) != nil {
		t.Errorf("none is %+v, %v", own, err)
	}
}

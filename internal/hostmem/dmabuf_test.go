// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

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
	if err := CloseDMABuf(given); err != nil {
		t.Error(err)
	}
	if _, err := DupDMABuf(given); !errors.Is(err, driver.ErrBounds) ||
		!errors.Is(err, unix.EBADF) {
		t.Errorf("a descriptor that is closed: %v", err)
	}
	if err := unix.Ftruncate(own.FD, 1); err != nil {
		t.Errorf("the other one: %v", err)
	}
	if err := CloseDMABuf(own); err != nil {
		t.Error(err)
	}
	if own, err := DupDMABuf(nil); own != nil || err != nil || CloseDMABuf(own) != nil {
		t.Errorf("none is %+v, %v", own, err)
	}
}

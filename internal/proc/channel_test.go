// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

func inVirtualTime(t *testing.T, do func(t *testing.T)) {
	defer Virtual()()
	synctest.Test(t, do)
}

func TestVirtualTimePassesForAWaiter(t *testing.T) {
	inVirtualTime(t, func(t *testing.T) {
		e := mustEvent(t)
		began := time.Now()
		time.AfterFunc(time.Hour, func() { _ = e.Signal() })
		require.NoError(t, e.Wait())
		require.EqualValues(t, time.Hour, time.Since(began), "a signal came after")
		require.NoError(t, e.SetDeadline(time.Now().Add(time.Minute)))
		require.Equal(t, driver.ErrTimeout, e.Wait())
		require.EqualValues(t, time.Hour+time.Minute, time.Since(began),
			"a deadline came after")
	})
}

func TestVirtualDeadlineIsMoved(t *testing.T) {
	inVirtualTime(t, func(t *testing.T) {
		e := mustEvent(t)
		began := time.Now()
		require.NoError(t, e.SetDeadline(began.Add(time.Second)))
		time.AfterFunc(time.Second/2, func() { _ = e.SetDeadline(began.Add(2 * time.Second)) })
		require.Equal(t, driver.ErrTimeout, e.Wait())
		require.EqualValues(t, 2*time.Second, time.Since(began), "a deadline of 2 s came after")
		_ = e.Signal()
		require.Equal(t, driver.ErrTimeout, e.Wait(), "a signal beside a deadline that is over")
	})
}

func TestVirtualDescriptors(t *testing.T) {
	inKernel := mustEvent(t)
	inVirtualTime(t, func(t *testing.T) {
		e := mustEvent(t)
		number := e.FD()
		_, err := unix.FcntlInt(uintptr(number), unix.F_GETFD, 0)
		require.Equal(t, unix.EBADF, err, "the kernel knows the descriptor")
		peer, err := EventFromFD(number)
		require.NoError(t, err)
		require.NoError(t, e.Close())
		_, err = EventFromFD(number)
		require.ErrorIs(t, err, unix.EBADF)
		require.NoError(t, peer.Signal())
		require.NoError(t, peer.Wait())
		require.NoError(t, peer.Close())

		same, err := EventFromFD(inKernel.FD())
		require.NoError(t, err)
		require.NoError(t, same.Signal())
		require.NoError(t, same.Close())
	})
	require.True(t, inKernel.Drain(), "an eventfd was signalled from virtual time")
	require.Nil(t, mustEvent(t).channel, "virtual time has ended")
}

// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// ourselves is a socket with both ends in this process.
func ourselves(t *testing.T) *net.UnixConn {
	name := &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"), Net: "unixpacket"}
	l, err := net.ListenUnix("unixpacket", name)
	require.NoError(t, err)
	defer l.Close()
	c, err := net.DialUnix("unixpacket", nil, name)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// of is a Remote for a process that is not at a socket.
func of(t *testing.T, c *exec.Cmd, pidfd bool) Remote {
	require.NoError(t, c.Start())
	t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
	r, fd := Remote{PID: c.Process.Pid, FD: -1}, -1
	if pidfd {
		var err error
		fd, err = unix.PidfdOpen(r.PID, 0)
		require.NoError(t, err)
	}
	require.NoError(t, r.watch(fd))
	require.Equal(t, pidfd, r.Known())
	return r
}

func TestRemoteLearnsOfTheEnd(t *testing.T) {
	for _, pidfd := range []bool{true, false} {
		c := exec.Command("sleep", "60")
		r := of(t, c, pidfd)
		require.False(t, r.Dead())
		if pidfd {
			again := of(t, exec.Command("sleep", "60"), true)
			again.StopWaits()
			require.ErrorIs(t, again.Wait(), driver.ErrTimeout)
			require.False(t, again.Dead())
			again.Release()
		}
		require.NoError(t, c.Process.Kill())
		if pidfd {
			require.NoError(t, r.Wait())
		} else {
			require.ErrorIs(t, r.Wait(), driver.ErrNotSupported)
		}
		_ = c.Wait()
		require.True(t, r.Dead())
		r.Release()
	}
}

// A descriptor that was closed may have another process's number by the next call.
func TestReleaseBesideDead(t *testing.T) {
	for range 50 {
		r, err := Identify(ourselves(t))
		require.NoError(t, err)
		require.Equal(t, os.Getpid(), r.PID)
		var all sync.WaitGroup
		for range 3 {
			all.Go(func() {
				for range 100 {
					require.False(t, r.Dead())
				}
			})
		}
		all.Go(r.Release)
		require.ErrorIs(t, r.Wait(), driver.ErrClosed)
		all.Wait()
		r.Release()
		require.False(t, r.Dead())
	}
}

// Only a kernel without pidfds has none: a process that is out of descriptors is refused.
func TestALackOfDescriptorsIsNoProof(t *testing.T) {
	open, peer := pidfdOpen, peerPIDFD
	defer func() { pidfdOpen, peerPIDFD = open, peer }()
	peerPIDFD = func(int) (int, error) { return -1, unix.ENOPROTOOPT } // before Linux 6.5
	for err, want := range map[error]bool{unix.EMFILE: false, unix.ENFILE: false,
		unix.ENOMEM: false, unix.ESRCH: false, unix.ENOSYS: true} {
		pidfdOpen = func(int, int) (int, error) { return -1, err }
		fd, got := openPIDFD(-1, os.Getpid())
		require.Equal(t, -1, fd)
		require.Equal(t, want, got == nil, "%v: %v", err, got)
	}
	peerPIDFD = func(int) (int, error) { return -1, unix.EMFILE }
	_, err := openPIDFD(-1, os.Getpid())
	require.ErrorIs(t, err, unix.EMFILE)
	r := Remote{FD: -1}
	require.ErrorIs(t, r.watch(-1), driver.ErrNotSupported)
}

func TestHost(t *testing.T) {
	a, err := Host()
	require.NoError(t, err)
	b, err := Host()
	require.NoError(t, err)
	require.Equal(t, a, b)
	require.NotZero(t, a)
}

// TestStateOf: a process that was killed has ended for as long as nobody reaps it.
func TestStateOf(t *testing.T) {
	child := exec.Command("sleep", "1000")
	require.NoError(t, child.Start())
	before, ended, err := StateOf(child.Process.Pid)
	require.NoError(t, err)
	require.False(t, ended)
	require.NoError(t, child.Process.Kill())
	for !ended {
		var start uint64
		start, ended, err = StateOf(child.Process.Pid)
		require.NoError(t, err)
		require.Equal(t, before, start)
		runtime.Gosched()
	}
	require.Error(t, child.Wait())
	_, _, err = StateOf(child.Process.Pid)
	require.ErrorIs(t, err, os.ErrNotExist)
}

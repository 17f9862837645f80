// SPDX-License-Identifier: Apache-2.0

package process

import (
	"errors"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

func TestProcess(t *testing.T) {
	self, err := This()
	if err != nil || self.PID == 0 || self.Start == 0 {
		t.Fatalf("%+v, %v", self, err)
	}
	fd, err := self.Open()
	require.NoError(t, err)
	_ = unix.Close(fd)
	later := self
	later.Start++
	if fd, err := later.Open(); !errors.Is(err, driver.ErrPeerLost) || fd != -1 {
		t.Errorf("another process of our number: %d, %v", fd, err)
	}
	c := exec.Command("true")
	require.NoError(t, c.Run())
	gone := ID{uint32(c.Process.Pid), self.Start}
	if _, err := gone.Open(); !errors.Is(err, driver.ErrPeerLost) {
		t.Errorf("a process that has ended: %v", err)
	}
	a, err := Host()
	if b, _ := Host(); err != nil || a != b || a == [8]byte{} {
		t.Errorf("host %x, then %x, %v", a, b, err)
	}
}

// TestOpenWithoutDescriptors has the pidfd take the last descriptor: that the start of the
// process cannot be read then is no proof that it has ended.
func TestOpenWithoutDescriptors(t *testing.T) {
	self, err := This()
	require.NoError(t, err)
	next, err := unix.Dup(0)
	require.NoError(t, err)
	_ = unix.Close(next)
	var was unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &was))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(next) + 1,
		Max: was.Max}))
	fd, err := self.Open()
	if back := unix.Setrlimit(unix.RLIMIT_NOFILE, &was); back != nil {
		t.Fatal(back)
	}
	if fd != -1 || !errors.Is(err, unix.EMFILE) || errors.Is(err, driver.ErrPeerLost) {
		t.Errorf("a process that lives: %d, %v", fd, err)
	}
}

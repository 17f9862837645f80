// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// sockets counts those of a process: an endpoint over TCP has at least one.
func sockets(t *testing.T, pid int) (n int) {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd/", pid)
	list, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, f := range list {
		if target, err := os.Readlink(dir + f.Name()); err == nil &&
			strings.HasPrefix(target, "socket:") {
			n++
		}
	}
	return n
}

// TestPausesLeaveNothing stops a peer that something waits for until it is given up, has it go on,
// and connects anew, several times: neither process keeps more of the later pauses than of the
// first, and a fence works as before.
func TestPausesLeaveNothing(t *testing.T) {
	for _, list := range []string{"posix,sysv,cma,self", "tcp"} {
		t.Run(list, func(t *testing.T) { pausesLeaveNothing(t, list) })
	}
}

func pausesLeaveNothing(t *testing.T, list string) {
	o := startOwner(t, Config{Transports: list, Devices: "lo", Grace: shortGrace,
		Failure: shortGrace}, shortGrace)
	var ours, theirs int
	for round := range 4 {
		p, key := o.connect()
		o.write(p, key, 0, lateBytes)
		require.NoError(t, o.outcome())
		o.freeze()
		o.write(p, key, 0, lateBytes)
		<-p.Lost()
		require.NoError(t, p.Close())
		require.ErrorIs(t, o.outcome(), driver.ErrPeerLost)
		o.thaw()
		o.settle(lateBytes)
		if round == 1 {
			ours, theirs = sockets(t, os.Getpid()), sockets(t, o.cmd.Process.Pid)
		}
	}
	eventually(t, "the sockets of earlier pauses are gone", func() bool {
		return sockets(t, os.Getpid()) <= ours && sockets(t, o.cmd.Process.Pid) <= theirs
	})
	o.fence()
}

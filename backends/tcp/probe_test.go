// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"net"
	"os"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// natForgets is after how many seconds a NAT may have forgotten a connection on which it saw no
// packet.
const natForgets = 60

// The kernel probes connections on which nothing happens, at both ends, often enough that a NAT
// between them does not forget them.
func TestIdleConnectionsAreProbed(t *testing.T) {
	testkit.CheckLeaks(t)
	owner, near := open(t, Config{}), open(t, Config{})
	defer dial(t, near, owner.Addr()).Close()
	port := owner.listener.Addr().(*net.TCPAddr).Port
	ends := 0
	fds, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, f := range fds {
		fd, err := strconv.Atoi(f.Name())
		require.NoError(t, err)
		if portOf(unix.Getpeername(fd)) != port && portOf(unix.Getsockname(fd)) != port {
			continue
		}
		if _, err := unix.Getpeername(fd); err != nil {
			continue // it listens
		}
		ends++
		on, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE)
		require.NoError(t, err)
		require.Equal(t, 1, on)
		for _, option := range []int{unix.TCP_KEEPIDLE, unix.TCP_KEEPINTVL} {
			seconds, err := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, option)
			require.NoError(t, err)
			require.LessOrEqual(t, seconds, natForgets/3) // two probes may be lost
		}
	}
	require.Equal(t, 2*(1+owner.cfg.Conns), ends)
}

// portOf returns the port of a TCP address, and 0 for any other address.
func portOf(at unix.Sockaddr, _ error) int {
	switch a := at.(type) {
	case *unix.SockaddrInet4:
		return a.Port
	case *unix.SockaddrInet6:
		return a.Port
	}
	return 0
}

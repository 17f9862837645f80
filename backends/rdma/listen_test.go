// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"net"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// silentAddress is one whose kernel answers no connection: the queue of its listener is full.
func silentAddress(t *testing.T) netip.AddrPort {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Close(fd)) })
	require.NoError(t, unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	require.NoError(t, unix.Listen(fd, 0))
	name, err := unix.Getsockname(fd)
	require.NoError(t, err)
	at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}),
		uint16(name.(*unix.SockaddrInet4).Port))
	first, err := net.Dial("tcp", at.String())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, first.Close()) })
	return at
}

// TestAddressThatIsSilent has the first of two addresses of an owner not answer: the other is tried
// a little later, and an error says of both why they did not serve.
func TestAddressThatIsSilent(t *testing.T) {
	c, p := openClocked(t, Config{})
	silent, refused := silentAddress(t), netip.MustParseAddrPort("127.0.0.1:1")
	for _, other := range []netip.AddrPort{p.far.address.control[0], refused} {
		var conn net.Conn
		err := c.during(t, func() (err error) {
			both := &address{control: []netip.AddrPort{silent, other}}
			conn, err = p.near.reach(t.Context(), both)
			return err
		})
		if other != refused {
			require.NoError(t, err)
			require.NoError(t, conn.Close())
			continue
		}
		require.ErrorIs(t, err, driver.ErrTimeout)
		require.ErrorIs(t, err, unix.ECONNREFUSED)
	}
}

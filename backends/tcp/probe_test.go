// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// The kernel probes connections on which nothing happens, at both ends, often enough that a NAT
// between them does not forget them, as it may after a minute.
func TestIdleConnectionsAreProbed(t *testing.T) {
	testkit.CheckLeaks(t)
	owner, near := open(t, Config{}), open(t, Config{})
	p := dial(t, near, owner.Addr())
	ends := p.conns
	for g := range acceptedBy(owner) {
		ends = append(ends, g.conns...)
	}
	require.Len(t, ends, 2*(1+owner.cfg.Conns))
	for _, c := range ends {
		require.NoError(t, c.raw.Control(func(fd uintptr) {
			on, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_KEEPALIVE)
			require.NoError(t, err)
			require.Equal(t, 1, on)
			for _, option := range []int{unix.TCP_KEEPIDLE, unix.TCP_KEEPINTVL} {
				seconds, err := unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, option)
				require.NoError(t, err)
				require.LessOrEqual(t, seconds, 60/3) // two probes may be lost
			}
		}))
	}
}

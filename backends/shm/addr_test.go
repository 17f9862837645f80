// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

func TestAddress(t *testing.T) {
	a := newAddress("/run/a:b")
	require.NotZero(t, a.net)
	again, err := decodeAddress(a.encode())
	require.NoError(t, err)
	require.Equal(t, a, again)
	for text, want := range map[string]error{
		"shm4:1:00112233445566778899aabbccddeeff:":    driver.ErrVersion,
		"shm5:1:00112233445566778899aabbccddeeff:":    driver.ErrCorrupt,
		"shm5:1:-2:00112233445566778899aabbccddeeff:": driver.ErrCorrupt,
		"shm5:1:2:0011:": driver.ErrCorrupt,
	} {
		_, err := decodeAddress([]byte(text))
		require.ErrorIs(t, err, want, text)
	}
}

// TestUnreachedPeer: another network namespace and a directory that is not there are named,
// with the cure.
func TestUnreachedPeer(t *testing.T) {
	b := open(t, Config{})
	connect := func(a address) error {
		_, err := b.Connect(context.Background(), a.encode())
		return err
	}
	gone := newAddress("")
	require.ErrorIs(t, connect(gone), unix.ECONNREFUSED)
	require.NotContains(t, connect(gone).Error(), "namespace")
	gone.net++
	require.ErrorIs(t, connect(gone), unix.ECONNREFUSED)
	require.ErrorContains(t, connect(gone), fmt.Sprintf("the peer is in network namespace %d of "+
		"this host, and this process in %d: set SocketDir", gone.net, gone.net-1))
	gone.dir = t.TempDir()
	require.ErrorContains(t, connect(gone), "no socket of the peer in "+gone.dir)
}

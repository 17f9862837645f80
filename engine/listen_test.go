// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// left makes the socket file of a program that was killed.
func left(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "socket")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	require.NoError(t, err)
	l.SetUnlinkOnClose(false)
	require.NoError(t, l.Close())
	return path
}

func TestListenReplacesTheSocketOfAKilledProgram(t *testing.T) {
	path := left(t)
	l, err := Listen("unix", path)
	require.NoError(t, err)
	_, err = Listen("unix", path)
	require.ErrorIs(t, err, syscall.EADDRINUSE)
	require.ErrorContains(t, err, "a program listens there")
	require.NoError(t, l.Close())
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	_, err = Listen("unix", path)
	require.ErrorIs(t, err, syscall.EADDRINUSE, "a file that is no socket stays")
	require.FileExists(t, path)
}

// TestListenOfSeveralAtOnce: one of them has the path, and is reached there.
func TestListenOfSeveralAtOnce(t *testing.T) {
	for range 20 {
		path := left(t)
		var all sync.WaitGroup
		found := make(chan net.Listener, 4)
		for range cap(found) {
			all.Go(func() {
				if l, err := Listen("unix", path); err == nil {
					found <- l
				}
			})
		}
		all.Wait()
		require.Len(t, found, 1)
		conn, err := net.Dial("unix", path)
		require.NoError(t, err)
		require.NoError(t, conn.Close())
		require.NoError(t, (<-found).Close())
	}
}

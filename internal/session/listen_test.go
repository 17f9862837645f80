// SPDX-License-Identifier: Apache-2.0

package session

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

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
	_, err = Listen("unix", "/tmp/"+strings.Repeat("x", pathMax))
	require.ErrorIs(t, err, syscall.ENAMETOOLONG)
}

// TestListenBesideAnother has another program between bind and listen when we look first.
func TestListenBesideAnother(t *testing.T) {
	path := filepath.Join(t.TempDir(), "socket")
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer syscall.Close(fd)
	require.NoError(t, syscall.Bind(fd, &syscall.SockaddrUnix{Name: path}))
	listened := make(chan error, 1)
	time.AfterFunc(stalePause, func() { listened <- syscall.Listen(fd, 1) })
	l, err := Listen("unix", path)
	require.NoError(t, <-listened)
	if err == nil { // the machine stood still for as long as we looked
		require.NoError(t, l.Close())
		return
	}
	require.ErrorIs(t, err, syscall.EADDRINUSE)
	conn, err := net.Dial("unix", path)
	require.NoError(t, err, "the socket of a program that lives is gone")
	require.NoError(t, conn.Close())
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

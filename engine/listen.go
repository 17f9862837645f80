// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// staleTries and stalePause bound the wait for another program that is about to listen.
const (
	staleTries = 40
	stalePause = 50 * time.Millisecond
)

// Listen is net.Listen for Serve. The socket file that a killed program has left does not stop it:
// a file at which the kernel refuses connections is replaced. Programs that start at the same time
// do so one after the other, by a lock of the folder.
func Listen(network, address string) (net.Listener, error) {
	l, err := net.Listen(network, address)
	if err == nil || network != "unix" || !errors.Is(err, syscall.EADDRINUSE) ||
		strings.HasPrefix(address, "@") {
		return l, err
	}
	folder, failed := os.Open(filepath.Dir(address))
	if failed != nil {
		return nil, err
	}
	defer folder.Close()
	for try := 0; ; try++ {
		failed = syscall.Flock(int(folder.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if failed == nil {
			break
		}
		if try == staleTries {
			return nil, err
		}
		time.Sleep(stalePause)
	}
	if !stale(address) {
		return nil, fmt.Errorf("%w: a program listens there, or the file is no socket: choose "+
			"another path", err)
	}
	if err := os.Remove(address); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove the socket of a program that has ended: %w", err)
	}
	return net.Listen(network, address)
}

// stale reports whether a path is a socket of no program.
func stale(path string) bool {
	info, err := os.Lstat(path)
	if err != nil {
		return errors.Is(err, os.ErrNotExist)
	}
	if info.Mode()&os.ModeSocket == 0 {
		return false
	}
	conn, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		_ = conn.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}

// SPDX-License-Identifier: Apache-2.0

package rendezvous

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

// Another program may be about to listen: this is how often, and how far apart, its lock is asked
// for, and a socket that refuses connections is asked again.
const (
	lockTries  = 40
	lockPause  = 50 * time.Millisecond
	staleTries = 5
	stalePause = 25 * time.Millisecond
)

// Listen is net.Listen. The socket file that a killed program has left does not stop it:
// a file at which the kernel refuses connections is replaced. Programs that call it at the same
// time do so one after the other, by a lock of the folder: a socket refuses connections, too,
// between the two system calls by which a program begins to listen.
func Listen(network, address string) (net.Listener, error) {
	if network != "unix" || strings.HasPrefix(address, "@") {
		return net.Listen(network, address)
	}
	folder, err := os.Open(filepath.Dir(address))
	if err != nil {
		return net.Listen(network, address)
	}
	defer folder.Close()
	lock := func() bool {
		return syscall.Flock(int(folder.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil
	}
	locked := lock()
	for try := 1; !locked && try < lockTries; try++ {
		time.Sleep(lockPause)
		locked = lock()
	}
	l, err := net.Listen(network, address)
	if !locked || !errors.Is(err, syscall.EADDRINUSE) {
		return l, err
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

// stale reports whether a path is a socket of no program, and stays so for a while.
func stale(path string) bool {
	for try := 0; ; try++ {
		if !refuses(path) {
			return false
		}
		if try == staleTries {
			return true
		}
		time.Sleep(stalePause)
	}
}

// refuses reports whether a path is a socket at which the kernel refuses connections, or nothing.
func refuses(path string) bool {
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

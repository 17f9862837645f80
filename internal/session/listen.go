// SPDX-License-Identifier: Apache-2.0

package session

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/sluicehq/sluice/internal/proc"
)

// Another program may be about to listen. Listen tries the lock of the folder lockTries times,
// lockPause apart. stale tries a socket that refuses connections staleTries more times, stalePause
// apart.
const (
	lockTries  = 40
	lockPause  = 50 * time.Millisecond
	staleTries = 5
	stalePause = 25 * time.Millisecond
)

// pathMax is how many bytes the address of a Unix socket has room for (unix(7): sun_path).
const pathMax = 107

// Listen is net.Listen, except that it replaces a stale Unix socket: a socket file that a killed
// program has left, so that the kernel refuses connections to it, or takes them for a child of that
// program, which has its descriptors still.
//
// The kernel also refuses connections while a live program is between bind and listen. To leave
// such a socket alone, concurrent calls of Listen exclude each other by a lock on the folder, and
// Listen replaces a socket only after it has refused connections for a while.
func Listen(network, address string) (net.Listener, error) {
	if !strings.HasPrefix(network, "unix") || strings.HasPrefix(address, "@") {
		return net.Listen(network, address)
	}
	if len(address) > pathMax {
		return nil, fmt.Errorf("listen %s: a path of %d bytes, and a Unix socket takes %d: "+
			"choose a shorter one: %w", address, len(address), pathMax, syscall.ENAMETOOLONG)
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
	if !stale(network, address) {
		return nil, fmt.Errorf("%w: a program listens there, or the file is no socket: choose "+
			"another path", err)
	}
	if err := os.Remove(address); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove the socket of a program that has ended: %w", err)
	}
	return net.Listen(network, address)
}

// stale reports whether a path refuses connections, each time that it is tried.
func stale(network, path string) bool {
	for try := 0; ; try++ {
		if !refuses(network, path) {
			return false
		}
		if try == staleTries {
			return true
		}
		time.Sleep(stalePause)
	}
}

// refuses reports whether a path is a socket that refuses connections, or whose program has ended,
// or does not exist.
func refuses(network, path string) bool {
	info, err := os.Lstat(path)
	if err != nil {
		return errors.Is(err, os.ErrNotExist)
	}
	if info.Mode()&os.ModeSocket == 0 {
		return false
	}
	conn, err := net.DialTimeout(network, path, time.Second)
	if err != nil {
		return errors.Is(err, syscall.ECONNREFUSED)
	}
	defer conn.Close()
	program, err := proc.Identify(conn.(*net.UnixConn))
	if err != nil {
		return errors.Is(err, os.ErrProcessDone)
	}
	defer program.Release()
	return program.Dead()
}

// SPDX-License-Identifier: Apache-2.0

package session

import (
	"errors"
	"net"
	"slices"
	"syscall"
	"time"
)

// breath is how long Serve waits for room, or where the kernel has no more descriptors.
const breath = 5 * time.Millisecond

// Serve accepts connections until the listener ends, and says how it ended. start begins a
// goroutine for each, which waits for its place first; it reports false where it may not.
func (l *Lobby) Serve(from net.Listener, start func(net.Conn, *Visit) bool) error {
	for {
		conn, err := from.Accept()
		if err != nil && passes(err) {
			time.Sleep(breath)
			continue
		}
		if err != nil {
			return err
		}
		v := l.Arrive(conn)
		for v == nil && HostOf(conn) == (Host{}) && !l.isClosed() {
			time.Sleep(breath) // the next ones wait in the kernel: all are of one host
			v = l.Arrive(conn)
		}
		if v == nil {
			_ = conn.Close()
		} else if !start(conn, v) {
			_ = conn.Close()
			v.Leave()
		}
	}
}

func (l *Lobby) isClosed() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.closed
}

// passes reports whether Accept may do better later: others may hold all descriptors.
func passes(err error) bool {
	var errno syscall.Errno
	return errors.As(err, &errno) &&
		!slices.Contains([]syscall.Errno{syscall.EBADF, syscall.EINVAL, syscall.ENOTSOCK}, errno)
}

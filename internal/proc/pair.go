// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"fmt"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Pair makes two connected Unix sockets to be inherited by two children, or by
// one and kept: peers that find each other this way need no name anywhere. The
// caller closes both files.
func Pair() (a, b *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a socket pair: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "pair-a"), os.NewFile(uintptr(fds[1]), "pair-b"), nil
}

// Conn makes a connection of an inherited or kept end, and closes the file.
func Conn(f *os.File) (net.Conn, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("use the socket pair: %w", err)
	}
	return c, nil
}

// Single is a net.Listener that accepts one connection, which exists already.
type Single struct {
	conn   chan net.Conn
	closed chan struct{}
	once   sync.Once
	addr   net.Addr
}

// NewSingle makes a listener for a connection, which becomes its own.
func NewSingle(c net.Conn) *Single {
	s := &Single{conn: make(chan net.Conn, 1), closed: make(chan struct{}), addr: c.LocalAddr()}
	s.conn <- c
	return s
}

// Accept returns the connection, and on further calls waits for Close.
func (s *Single) Accept() (net.Conn, error) {
	select {
	case c := <-s.conn:
		return c, nil
	case <-s.closed:
		return nil, net.ErrClosed
	}
}

// Close ends Accept; a connection that was not accepted is closed.
func (s *Single) Close() error {
	s.once.Do(func() {
		close(s.closed)
		select {
		case c := <-s.conn:
			c.Close()
		default:
		}
	})
	return nil
}

// Addr is that of the connection.
func (s *Single) Addr() net.Addr { return s.addr }

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/internal/session"
)

// checkUser refuses the other end of a Unix socket when it runs as another user.
// Other streams are for TLS to check.
func checkUser(conn net.Conn) error {
	u, ok := conn.(*net.UnixConn)
	if !ok {
		return nil
	}
	cred, err := credentials(u)
	if err != nil {
		return fmt.Errorf("check user of the other side: %w", err)
	}
	if int(cred.Uid) != os.Geteuid() {
		return fmt.Errorf("the other side runs as user %d, this one as %d: run both as one user, "+
			"or use TLS over TCP: %w", cred.Uid, os.Geteuid(), os.ErrPermission)
	}
	return nil
}

func credentials(u *net.UnixConn) (cred *unix.Ucred, err error) {
	raw, err := u.SyscallConn()
	if err != nil {
		return nil, err
	}
	controlErr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if controlErr != nil {
		return nil, controlErr
	}
	return cred, err
}

// originOf names the process at the other end of a Unix socket, and the host of another stream.
func originOf(conn net.Conn) string {
	if u, ok := conn.(*net.UnixConn); ok {
		if cred, err := credentials(u); err == nil {
			return fmt.Sprintf("process %d", cred.Pid)
		}
	}
	return "host " + session.HostOf(conn).String()
}

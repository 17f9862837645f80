// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// checkUser refuses the other end of a Unix socket when it runs as another user.
// Other streams are for TLS to check.
func checkUser(conn net.Conn) error {
	u, ok := conn.(*net.UnixConn)
	if !ok {
		return nil
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return fmt.Errorf("check user of the other side: %w", err)
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return fmt.Errorf("check user of the other side: %w", err)
	}
	if credErr != nil {
		return fmt.Errorf("check user of the other side: %w", credErr)
	}
	if int(cred.Uid) != os.Geteuid() {
		return fmt.Errorf("the other side runs as user %d, this one as %d: run both as one user, "+
			"or use TLS over TCP: %w", cred.Uid, os.Geteuid(), os.ErrPermission)
	}
	return nil
}

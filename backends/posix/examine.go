// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"errors"
	"os"
	"strings"
	"syscall"

	"github.com/sluicehq/sluice/driver"
)

// Examine opens a backend and says by what its requests reach the kernel, and why.
func Examine(cfg Config) (choice string, err error) {
	b, err := New(cfg)
	if err != nil {
		return "", err
	}
	return b.Choice(), b.Close()
}

// unavailable says that io_uring was asked for and is not to be had.
func unavailable(err error) error {
	return &driver.UnavailableError{Backend: "posix", Reason: err.Error(), Fix: fix(err)}
}

// fix names what would let us have io_uring.
func fix(err error) string {
	disabled, _ := os.ReadFile("/proc/sys/kernel/io_uring_disabled")
	switch {
	case len(disabled) > 0 && strings.TrimSpace(string(disabled)) != "0":
		return "sysctl kernel.io_uring_disabled=0"
	case errors.Is(err, syscall.ENOSYS):
		return "a kernel with io_uring, Linux 5.6 or later"
	case errors.Is(err, syscall.EPERM):
		return "a seccomp profile that allows io_uring_setup, io_uring_enter and io_uring_register"
	}
	return ""
}

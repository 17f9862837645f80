// SPDX-License-Identifier: Apache-2.0

// Package process names processes and hosts, so that another process can tell whether
// it means the same one.
package process

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// ID names a process of this host for good: a number alone may be
// another's later.
type ID struct {
	PID   uint32
	Start uint64 // when it began, in ticks since the host did
}

// This reads what names our process.
func This() (ID, error) {
	pid := os.Getpid()
	start, err := StartOf(pid)
	return ID{uint32(pid), start}, err
}

// StartOf is field 22 of /proc/<pid>/stat. The second one, in brackets, is the
// program's name, which may hold anything.
func StartOf(pid int) (uint64, error) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, fmt.Errorf("identify process %d: %w", pid, err)
	}
	_, after, _ := bytes.Cut(stat[bytes.LastIndexByte(stat, ')')+1:], []byte(" "))
	fields := bytes.Fields(after)
	const at = 22 - 3 // the state is field 3
	if len(fields) <= at {
		return 0, fmt.Errorf("identify process %d: /proc tells %d fields: %w", pid, len(fields),
			driver.ErrCorrupt)
	}
	start, err := strconv.ParseUint(string(fields[at]), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("identify process %d: %w", pid, err)
	}
	return start, nil
}

// Open returns a descriptor, the caller's to close, of the process that is readable once it has
// ended. ErrPeerLost says that it has by now. What has the number after the descriptor was made,
// and began when our process did, was there before: it is ours.
func (p ID) Open() (fd int, err error) {
	fd, err = unix.PidfdOpen(int(p.PID), 0)
	if err == unix.ESRCH || err == unix.EINVAL {
		return -1, p.Ended()
	}
	if err != nil {
		return -1, fmt.Errorf("watch process %d: %w", p.PID, os.NewSyscallError("pidfd_open", err))
	}
	start, err := StartOf(int(p.PID))
	if err == nil && start == p.Start {
		return fd, nil
	}
	_ = unix.Close(fd)
	if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ESRCH) {
		return -1, err // a lack of descriptors, say, proves nothing
	}
	return -1, p.Ended()
}

// Ended is the error that says that it is no more: driver.ErrPeerLost.
func (p ID) Ended() error {
	return fmt.Errorf("process %d has ended: %w", p.PID, driver.ErrPeerLost)
}

// Host digests what two processes must have in common to share memory and to
// see each other's end: the boot, the namespaces, and the user.
func Host() (id [8]byte, err error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return id, fmt.Errorf("identify host: %w", err)
	}
	for _, space := range []string{"ipc", "pid", "user", "mnt"} {
		name, err := os.Readlink("/proc/self/ns/" + space)
		if err != nil {
			return id, fmt.Errorf("identify host: %w", err)
		}
		boot = append(boot, name...)
	}
	boot = strconv.AppendInt(boot, int64(os.Getuid()), 10)
	sum := sha256.Sum256(boot)
	copy(id[:], sum[:])
	return id, nil
}

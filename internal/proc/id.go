// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"strconv"

	"github.com/sluicehq/sluice/driver"
)

// StartOf says when a process began, in ticks since the host did: with its number it names the
// process for good. It is field 22 of /proc/<pid>/stat. The second one, in brackets, is the
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

// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// memlock knows how much memory this process may pin. The kernel counts a range once for
// each registration of it: on each rail, and again while peers may reach it.
type memlock struct {
	exempt bool                                 // CAP_IPC_LOCK
	limits func() (limit, used uint64, ok bool) // in bytes
}

const (
	capIPCLock = 14
	memlockFix = "ulimit -l unlimited; LimitMEMLOCK=infinity in a systemd unit; --ulimit " +
		"memlock=-1 for a container"
)

func thisMemlock() memlock {
	mask, err := strconv.ParseUint(statusField("CapEff"), 16, 64)
	return memlock{exempt: err == nil && mask&(1<<capIPCLock) != 0, limits: memlockNow}
}

func memlockNow() (limit, used uint64, ok bool) {
	var r unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r) != nil || r.Cur == unix.RLIM_INFINITY {
		return 0, 0, false
	}
	for _, name := range []string{"VmPin", "VmLck"} {
		kilobytes, _, _ := strings.Cut(statusField(name), " ")
		n, _ := strconv.ParseUint(kilobytes, 10, 64) // absent is none
		used += n << 10
	}
	return r.Cur, used, true
}

// statusField reads a line of /proc/self/status.
func statusField(name string) string {
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// check says ahead that a range cannot be pinned on so many rails.
func (m *memlock) check(n uint64, rails int) error {
	if m.exempt {
		return nil
	}
	limit, used, ok := m.limits()
	if !ok || n <= (limit-min(used, limit))/uint64(rails) {
		return nil
	}
	return memlockError(fmt.Sprintf("%d bytes on %d rails cannot be pinned: RLIMIT_MEMLOCK is %d "+
		"bytes, of which %d are used", n, rails, limit, used))
}

// explain says what a refusal of the kernel may come from.
func (m *memlock) explain(err error, n uint64, rails int) error {
	if !errors.Is(err, syscall.ENOMEM) && !errors.Is(err, syscall.EAGAIN) {
		return err
	}
	return memlockError(fmt.Sprintf("%d bytes on %d rails cannot be pinned: %v", n, rails, err))
}

func memlockError(reason string) error {
	return unavailable(reason, memlockFix)
}

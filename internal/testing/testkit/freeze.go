// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// freezeLimit is for a machine that is very busy: a process stops in microseconds.
const freezeLimit = 10 * time.Second

// Freeze stops a child of ours, as a debugger or a cgroup would, and returns when all its threads
// stand.
func Freeze(p *os.Process) error {
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		return fmt.Errorf("stop process %d: %w", p.Pid, err)
	}
	return AwaitFreeze(p)
}

// AwaitFreeze returns when all threads of a child of ours stand that stops itself, or that another
// stops.
func AwaitFreeze(p *os.Process) error {
	for end := time.Now().Add(freezeLimit); time.Now().Before(end); time.Sleep(time.Millisecond) {
		var info unix.Siginfo
		err := unix.Waitid(unix.P_PID, p.Pid, &info, unix.WSTOPPED|unix.WNOWAIT|unix.WNOHANG, nil)
		if err != nil && err != unix.EINTR {
			return fmt.Errorf("wait until process %d stands: %w", p.Pid, err)
		}
		if info.Signo == int32(unix.SIGCHLD) {
			return nil
		}
	}
	return fmt.Errorf("process %d does not stop within %v", p.Pid, freezeLimit)
}

// Thaw lets a stopped process go on.
func Thaw(p *os.Process) error {
	if err := p.Signal(syscall.SIGCONT); err != nil {
		return fmt.Errorf("continue process %d: %w", p.Pid, err)
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"
)

var ptraceScopes = []string{"classic", "children only", "administrators only", "no process"}

func (s *Source) ptrace() Check {
	const file = "proc/sys/kernel/yama/ptrace_scope"
	c := Check{Name: "ptrace-scope", State: OK, Found: "no restriction (no Yama)",
		Backends: backendsOf("shm"),
		Why:      "process_vm_readv moves memory that cannot be mapped by the peer"}
	scope, ok := s.number(file)
	if !ok {
		return c
	}
	c.Found = strconv.FormatUint(scope, 10)
	if scope < uint64(len(ptraceScopes)) {
		c.Found += " (" + ptraceScopes[scope] + ")"
	}
	if scope > 1 {
		c.Backends = backendsOf("shm")
	}
	if scope > 0 {
		c.State = Limited
		c.Why = "process_vm_readv is refused between siblings: memory that was not made to be " +
			"shared has no route of shm"
		c.Fix = "sysctl -w kernel.yama.ptrace_scope=0"
	}
	return c
}

// copies makes the call itself: a seccomp profile that refuses it is seen nowhere else.
func (s *Source) copies() Check {
	c := Check{Name: "process-vm", State: OK, Found: "allowed", Backends: backendsOf("shm"),
		Why: "process_vm_readv moves memory that cannot be mapped by the peer"}
	if err := s.try(s.ProcessVM, tryProcessVM); err != nil {
		c.State, c.Found = Limited, "refused: "+err.Error()
		c.Why = "memory that was not made to be shared has no route of shm: use Engine.Alloc, or"
		c.Fix = "allow process_vm_readv and process_vm_writev (docker run --cap-add SYS_PTRACE)"
	}
	return c
}

// tryProcessVM copies a byte within this process: that passes every check but a filter of calls.
func tryProcessVM() error {
	from, to := []byte{1}, []byte{0}
	local := []unix.Iovec{{Base: &to[0], Len: 1}}
	remote := []unix.RemoteIovec{{Base: addressOf(from), Len: 1}}
	_, err := unix.ProcessVMReadv(unix.Getpid(), local, remote, 0)
	return err
}

// try makes a call: the one of a test, or the real one when it is this machine that is examined.
func (s *Source) try(test, real func() error) error {
	switch {
	case test != nil:
		return test()
	case s.Root != "":
		return nil // another machine's files cannot be asked
	}
	return real()
}

func (s *Source) memfd() Check {
	c := Check{Name: "memfd", State: OK, Found: "allowed", Backends: backendsOf("shm"),
		Why: "memory that both processes map is a memfd"}
	if err := s.try(s.MemFD, tryMemFD); err != nil {
		c.State, c.Found = Missing, "refused: "+err.Error()
		c.Fix = "allow memfd_create in the seccomp profile (docker run --security-opt " +
			"seccomp=unconfined)"
		return c
	}
	if n, ok := s.number("proc/sys/vm/memfd_noexec"); ok && n > 0 {
		c.Found = fmt.Sprintf("allowed, memfd_noexec=%d", n)
	}
	return c
}

func tryMemFD() error {
	fd, err := unix.MemfdCreate("sluice-doctor", unix.MFD_CLOEXEC)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// kernelWanted is the oldest kernel with all that shm uses: pidfd_open (5.3)
// and MADV_POPULATE_WRITE (5.14).
var kernelWanted = [2]int{5, 14}

func (s *Source) kernel() Check {
	release := s.text("proc/sys/kernel/osrelease")
	c := Check{Name: "kernel", State: OK, Found: release, Backends: backendsOf("shm posix"),
		Why: "shm finds a dead peer by pidfd and faults pages in by MADV_POPULATE_WRITE"}
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		c.State = Note
		return c
	}
	if major < kernelWanted[0] || major == kernelWanted[0] && minor < kernelWanted[1] {
		c.State = Limited
		c.Why = fmt.Sprintf("older than %d.%d: no pidfd or slower first touch", kernelWanted[0],
			kernelWanted[1])
	}
	return c
}

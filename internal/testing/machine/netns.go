// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// Host is a network namespace, joined with another by a virtual cable, in which processes run that
// share no memory by System V IPC either. Any goroutine may use it.
//
// Hosts have no names. A namespace lives as long as a descriptor of it and the processes
// in it, so it ends with the test, also when that panics or is killed. What a
// test finds on the machine (interfaces, addresses, named namespaces) is never touched. It
// takes root and the command ip; without them the error is a *driver.UnavailableError.
//
// A test that wants both ends of something on a host of their own calls BetweenHosts.
type Host struct {
	Device string     // its end of the cable: for UCX_NET_DEVICES
	Addr   netip.Addr // of Device

	net *os.File
}

// NewHost makes a host with a loopback device and no cable.
func NewHost() (*Host, error) {
	if err := missing(os.Geteuid(), exec.LookPath); err != nil {
		return nil, err
	}
	h := &Host{}
	err := onAnotherThread(func() error {
		return refused(unix.Unshare(unix.CLONE_NEWNET))
	}, func() (err error) {
		h.net, err = threadNamespace()
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := h.ip("link", "set", "lo", "up"); err != nil {
		return nil, errors.Join(err, h.Close())
	}
	return h, nil
}

// HostFromFile is a host that another process has made and handed on (File).
func HostFromFile(f *os.File) *Host { return &Host{net: f} }

// File is for exec.Cmd.ExtraFiles: it lets a child process use the host, by FromFile. It
// is the host's own.
func (h *Host) File() *os.File { return h.net }

// Close lets the namespace end with the last process in it.
func (h *Host) Close() error { return h.net.Close() }

// missing says what the machine lacks.
func missing(uid int, look func(string) (string, error)) error {
	if uid != 0 {
		return &driver.UnavailableError{Backend: "netns", Reason: "network namespaces are " +
			"made by root", Fix: "run the test as root"}
	}
	if _, err := look("ip"); err != nil {
		return &driver.UnavailableError{Backend: "netns", Reason: err.Error(),
			Fix: "apt-get install iproute2"}
	}
	return nil
}

// refused is the error of unshare.
func refused(err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSPC) {
		return &driver.UnavailableError{Backend: "netns",
			Reason: fmt.Sprintf("the kernel makes no network namespace: %v", err),
			Fix:    "run outside of the container, or give it CAP_SYS_ADMIN"}
	}
	return fmt.Errorf("make a network namespace: %w", err)
}

// threadNamespace opens the network namespace of this thread.
func threadNamespace() (*os.File, error) {
	f, err := os.Open(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()))
	if err != nil {
		return nil, fmt.Errorf("open the thread's network namespace: %w", err)
	}
	return f, nil
}

// Do runs f on a thread that is in the host: sockets that it makes belong there, also
// afterwards. Goroutines that it starts are elsewhere.
func (h *Host) Do(f func() error) error {
	return onAnotherThread(func() error {
		if err := unix.Setns(int(h.net.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter a network namespace: %w", err)
		}
		return nil
	}, f)
}

// onAnotherThread runs f on a thread that enter has taken to another namespace, and brings it back.
func onAnotherThread(enter, f func() error) error {
	result := make(chan error)
	go func() {
		err := errEnded
		defer func() { result <- err }()
		runtime.LockOSThread()
		home, e := threadNamespace()
		if e != nil {
			runtime.UnlockOSThread()
			err = e
			return
		}
		defer home.Close()
		defer func() {
			back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET)
			if back == nil {
				runtime.UnlockOSThread()
				return
			} // still locked: the thread ends with us, and serves no other goroutine
			err = errors.Join(err, fmt.Errorf("leave a network namespace: %w", back))
		}()
		if e = enter(); e == nil {
			e = f()
		}
		err = e
	}()
	return <-result
}

// errEnded is the outcome of a function that ends its goroutine.
var errEnded = errors.New("the function has not returned: it called FailNow, or runtime.Goexit")

// fresh mounts a /sys that shows the host's devices, where UCX looks for them, and
// becomes the command in the same process. The mount namespace is private.
const fresh = `mount -t sysfs sysfs /sys && exec "$0" "$@"`

// Start starts a process in the host, in an IPC and a UTS namespace of its own: what
// looks for a peer's host by those finds another one. Its /sys is that of the host. The
// command goes through a shell, which is no more when it runs.
func (h *Host) Start(c *exec.Cmd) error {
	if c.Err != nil {
		return c.Err
	}
	if c.SysProcAttr == nil {
		c.SysProcAttr = &syscall.SysProcAttr{}
	}
	c.SysProcAttr.Cloneflags |= unix.CLONE_NEWIPC | unix.CLONE_NEWUTS
	c.SysProcAttr.Unshareflags |= unix.CLONE_NEWNS
	c.Args = append([]string{"sh", "-c", fresh, c.Path}, c.Args[1:]...)
	c.Path = "/bin/sh"
	return h.Do(c.Start)
}

// ipLimit bounds a command.
const ipLimit = 10 * time.Second

// ip runs the command ip in the host.
func (h *Host) ip(args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), ipLimit)
	defer cancel()
	c := exec.CommandContext(ctx, "ip", args...)
	var out strings.Builder
	c.Stdout, c.Stderr = &out, &out
	err := h.Do(c.Start)
	if err == nil {
		err = c.Wait()
	}
	if err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err,
			strings.TrimSpace(out.String()))
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"bytes"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// nearVariable marks a run of a test binary within the near host of a pair, for the test that it
// names. The far host is its descriptor 3.
const nearVariable = "SLUICE_NETNS_NEAR"

// BetweenHosts runs a test once more on a host of its own, where it finds what that host has and no
// more, after what is to be set up of the pair has been. There it returns the host at the other end
// of the cable; here it returns nil when that is over, and has failed the test if the other run
// did. The error is that of NewPair or of the setting up.
func BetweenHosts(t testing.TB, setUp ...func(*Pair) error) (far *Host, err error) {
	t.Helper()
	if os.Getenv(nearVariable) == t.Name() {
		return HostFromFile(os.NewFile(3, "far host")), nil
	}
	pair, err := NewPair()
	if err != nil {
		return nil, err
	}
	defer pair.Close()
	for _, f := range append([]func(*Pair) error{(*Pair).await}, setUp...) {
		if err := f(pair); err != nil {
			return nil, err
		}
	}
	return nil, again(t, pair.Near.Start, pair.Far.File())
}

// AsRoot runs a test once more as root, of a user namespace where this is not root, and reports
// that it has done so. It has failed the test if the other run did. What that mounts ends with it,
// also when it is killed, as it is when this process is.
func AsRoot(t testing.TB) (ran bool, err error) {
	t.Helper()
	if os.Getenv(nearVariable) == t.Name() {
		return false, nil
	}
	attr := &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() != 0 {
		attr.Unshareflags = 0
		attr.Cloneflags = unix.CLONE_NEWUSER | unix.CLONE_NEWNET | unix.CLONE_NEWNS
		attr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getegid(), Size: 1}}
	}
	return true, again(t, func(c *exec.Cmd) error {
		c.SysProcAttr = attr
		return refused(c.Start())
	})
}

// again runs a test of this binary in a process that start starts. It has nine tenths of the time
// that this run has left, so that a test that hangs there says where. The error is one of the
// start, or says that it was skipped there.
func again(t testing.TB, start func(c *exec.Cmd) error, files ...*os.File) error {
	t.Helper()
	exe, err := os.Executable() // a name that other processes find as well
	if err != nil {
		return err
	}
	var text bytes.Buffer
	limit := flag.Lookup("test.timeout").Value.String()
	if at, ok := t.(interface{ Deadline() (time.Time, bool) }); ok {
		if end, ok := at.Deadline(); ok {
			limit = max(time.Until(end)*9/10, time.Second).String()
		}
	}
	name := t.Name()
	c := exec.Command(exe, "-test.run=^"+name+"$", "-test.v", "-test.timeout="+limit)
	c.WaitDelay = 10 * time.Second // its children hold its pipes, too
	for i, arg := range os.Args[1:] {
		// Flags of the test binary itself are left out, with the values that follow them.
		ofTest := strings.HasPrefix(arg, "-test.")
		if !ofTest && (strings.HasPrefix(arg, "-") || !strings.HasPrefix(os.Args[i], "-test.")) {
			c.Args = append(c.Args, arg)
		}
	}
	c.Env = append(os.Environ(), nearVariable+"="+name)
	c.ExtraFiles = files
	c.Stdout, c.Stderr = &text, &text
	if err := start(c); err != nil {
		return err
	}
	if err := c.Wait(); err != nil {
		t.Errorf("in a process of its own: %v", err)
	}
	for line := range strings.Lines(text.String()) {
		if !strings.HasPrefix(line, "=== ") {
			t.Log(strings.TrimRight(line, "\n"))
		}
	}
	if strings.Contains(text.String(), "--- SKIP: "+name) {
		return &driver.UnavailableError{Backend: "netns", Reason: "it was skipped in a process " +
			"of its own, which says why", Fix: "run the test as root"}
	}
	return nil
}

// carryLimit bounds the wait for a cable, which takes a moment.
const carryLimit = 20 * time.Second

// await waits until both ends carry: UCX passes a device over that does not when a backend is
// opened, and does not look again.
func (p *Pair) await() error {
	for _, h := range []*Host{p.Near, p.Far} {
		for end := time.Now().Add(carryLimit); ; time.Sleep(time.Millisecond) {
			var device *net.Interface
			err := h.Do(func() (err error) {
				device, err = net.InterfaceByName(h.Device)
				return err
			})
			if err == nil && device.Flags&net.FlagRunning != 0 {
				break
			}
			if time.Now().After(end) {
				return fmt.Errorf("the cable is not up within %v: %v", carryLimit, err)
			}
		}
	}
	return nil
}

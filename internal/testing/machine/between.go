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
	"testing"
	"time"
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
	out, err := pair.again(t)
	if err != nil {
		t.Errorf("on a host of its own: %v", err)
	}
	for line := range strings.Lines(out) {
		if !strings.HasPrefix(line, "=== ") {
			t.Log(strings.TrimRight(line, "\n"))
		}
	}
	return nil, nil
}

// again runs a test of this binary in the near host. It has nine tenths of the time that this run
// has left, so that a test that hangs there says where.
func (p *Pair) again(t testing.TB) (out string, err error) {
	exe, err := os.Executable() // a name that other processes find as well
	if err != nil {
		return "", err
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
	c.ExtraFiles = []*os.File{p.Far.File()}
	c.Stdout, c.Stderr = &text, &text
	if err := p.Near.Start(c); err != nil {
		return "", err
	}
	err = c.Wait()
	return text.String(), err
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

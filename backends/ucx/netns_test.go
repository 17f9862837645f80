// SPDX-License-Identifier: Apache-2.0

package ucx_test

import (
	"bytes"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/sluicehq/sluice/backends"
	"github.com/sluicehq/sluice/backends/backendtest"
	"github.com/sluicehq/sluice/backends/ucx"
	"github.com/sluicehq/sluice/internal/netns"
)

// nearVariable marks a run of this test binary within the near host of a pair. The
// far one is its descriptor 3.
const nearVariable = "SLUICE_UCX_TEST_NEAR"

// betweenHosts runs the test once more on a host of its own, where the backend of
// this process finds what that host has and no more. There it returns the host at
// the other end of the cable; here it returns nil, when that is over.
func betweenHosts(t *testing.T) *netns.Host {
	t.Helper()
	if os.Getenv(nearVariable) == t.Name() {
		return netns.FromFile(os.NewFile(3, "far host"))
	}
	b, err := ucx.New(ucx.Config{})
	if err != nil {
		backendtest.SkipIfUnavailable(t, err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	pair, err := netns.NewPair()
	if err != nil {
		backendtest.SkipIfUnavailable(t, err)
	}
	defer pair.Close()
	awaitCable(t, pair)
	var out bytes.Buffer
	again := exec.Command(program(t), "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=3m")
	again.Env = append(os.Environ(), nearVariable+"="+t.Name())
	again.ExtraFiles = []*os.File{pair.Far.File()}
	again.Stdout, again.Stderr = &out, &out
	if err := pair.Near.Start(again); err != nil {
		t.Fatal(err)
	}
	if err := again.Wait(); err != nil {
		t.Errorf("on a host of its own: %v", err)
	}
	for line := range strings.Lines(out.String()) {
		if !strings.HasPrefix(line, "=== ") {
			t.Log(strings.TrimRight(line, "\n"))
		}
	}
	return nil
}

// awaitCable waits until both ends carry: UCX passes a device over that does not when
// a backend is opened, and does not look again.
func awaitCable(t *testing.T, pair *netns.Pair) {
	t.Helper()
	for _, h := range []*netns.Host{pair.Near, pair.Far} {
		for end := time.Now().Add(limit); ; time.Sleep(time.Millisecond) {
			var device *net.Interface
			err := h.Do(func() (err error) {
				device, err = net.InterfaceByName(h.Device)
				return err
			})
			if err == nil && device.Flags&net.FlagRunning != 0 {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("the cable is not up within %v: %v", limit, err)
			}
		}
	}
}

// TestBetweenHosts is the suite over a cable. Nobody tells UCX which: it has to find
// the device, and not to take what shares memory.
func TestBetweenHosts(t *testing.T) {
	far := betweenHosts(t)
	if far == nil {
		return
	}
	backendtest.Run(t, backendtest.Harness{
		Name:    "ucx", // the far side's backend: with the same Config, which is none
		New:     func() (backends.Backend, error) { return ucx.New(ucx.Config{}) },
		Start:   far.Start,
		Limit:   10 * time.Second,
		Wirings: backendtest.Processes,
	})
}

// program is this test binary, under a name that other processes find as well.
func program(t *testing.T) string {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

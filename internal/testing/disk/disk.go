// SPDX-License-Identifier: Apache-2.0

// Package disk makes disks for tests: loop devices, and devices of the kernel's device mapper
// that fail, or that log what they are given. All ends with the test. What the machine, or the
// user, lacks is a *driver.UnavailableError, which skips the test.
package disk

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// Sector is the unit of tables.
const Sector = 512

// Needs skips a test for what is missing.
func Needs(t testing.TB, reason, fix string) {
	t.Helper()
	drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "disk", Reason: reason,
		Fix: fix})
}

// run runs a command that the machine may lack, or refuse.
func run(t testing.TB, fix, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		Needs(t, fmt.Sprintf("%s: %v: %s", name, err, strings.TrimSpace(string(out))), fix)
	}
	return strings.TrimSpace(string(out))
}

// File makes a file for Loop that holds zeros.
func File(t testing.TB, bytes int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk")
	f, err := os.Create(path)
	if err == nil {
		err = f.Truncate(bytes)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

// Loop makes a block device of a file. detach may be called before the test ends.
func Loop(t testing.TB, file string) (device string, detach func()) {
	t.Helper()
	if os.Geteuid() != 0 {
		Needs(t, "a loop device wants root", "run the test as root")
	}
	device = run(t, "run the test as root", "losetup", "--find", "--show", file)
	var over atomic.Bool
	detach = func() {
		if over.Swap(true) {
			return
		}
		if out, err := exec.Command("losetup", "--detach", device).CombinedOutput(); err != nil {
			t.Errorf("losetup: %v: %s", err, out)
		}
	}
	t.Cleanup(detach)
	return device, detach
}

// Format makes an ext4 on a device.
func Format(t testing.TB, device string) {
	t.Helper()
	run(t, "apt-get install e2fsprogs", "mkfs.ext4", "-q", "-m", "0", "-E", "nodiscard", device)
}

// Mount mounts an ext4 in a folder of the test's. unmount may be called before the test ends.
func Mount(t testing.TB, device string) (dir string, unmount func()) {
	t.Helper()
	dir = t.TempDir()
	if err := unix.Mount(device, dir, "ext4", 0, ""); err != nil {
		Needs(t, "mount: "+err.Error(), "run the test as root, or make guest")
	}
	var over atomic.Bool
	unmount = func() {
		if over.Swap(true) {
			return
		}
		err := unix.Unmount(dir, 0)
		// The kernel lets go of the files of a ring a moment after the ring was closed.
		for end := time.Now().Add(20 * time.Second); err == unix.EBUSY && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
			err = unix.Unmount(dir, 0)
		}
		if err != nil {
			t.Errorf("unmount %s: %v", dir, err)
			_ = unix.Unmount(dir, unix.MNT_DETACH)
		}
	}
	t.Cleanup(unmount)
	return dir, unmount
}

// Mapped is a device of the device mapper.
type Mapped struct {
	t    testing.TB
	name string
	over atomic.Bool

	Path string
}

var mapped atomic.Int64

// Map makes a device by a table.
func Map(t testing.TB, table ...string) *Mapped {
	t.Helper()
	m := &Mapped{t: t, name: fmt.Sprintf("sluice-test-%d-%d", os.Getpid(), mapped.Add(1))}
	if out, err := m.setup(table, "create"); err != nil {
		Needs(t, fmt.Sprintf("dmsetup: %v: %s", err, out), "make guest has a kernel with the "+
			"device mapper")
	}
	t.Cleanup(m.Remove)
	// udev may be late with the name of ours, or not there.
	m.Path = "/dev/" + m.must(nil, "info", "--columns", "--noheadings", "-o", "blkdevname")
	return m
}

func (m *Mapped) setup(table []string, verb string, args ...string) (string, error) {
	c := exec.Command("dmsetup", append([]string{verb, m.name}, args...)...)
	if verb == "create" || verb == "remove" {
		c.Args = append(c.Args, "--noudevsync", "--noudevrules")
	}
	c.Stdin = strings.NewReader(strings.Join(table, "\n"))
	out, err := c.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

func (m *Mapped) must(table []string, verb string, args ...string) string {
	m.t.Helper()
	out, err := m.setup(table, verb, args...)
	if err != nil {
		m.t.Fatalf("dmsetup %s: %v: %s", verb, err, out)
	}
	return out
}

// Message sends a message to the device's first target.
func (m *Mapped) Message(text string) {
	m.t.Helper()
	m.must(nil, "message", "0", text)
}

// Become gives the device another table. Requests under way end by the old one.
func (m *Mapped) Become(table ...string) {
	m.t.Helper()
	m.must(table, "reload")
	m.must(nil, "resume", "--noflush", "--nolockfs", "--noudevsync")
}

// Remove ends the device. It is idempotent.
func (m *Mapped) Remove() {
	if m.over.Swap(true) {
		return
	}
	if out, err := m.setup(nil, "remove", "--retry"); err != nil {
		m.t.Errorf("dmsetup: %v: %s", err, out)
	}
}

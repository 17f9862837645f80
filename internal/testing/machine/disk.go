// SPDX-License-Identifier: Apache-2.0

package machine

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

// NeedsDisk skips a test for what is missing.
func NeedsDisk(t testing.TB, reason, fix string) {
	t.Helper()
	drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "disk", Reason: reason,
		Fix: fix})
}

// run runs a command that the machine may lack, or refuse.
func run(t testing.TB, fix, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		NeedsDisk(t, fmt.Sprintf("%s: %v: %s", name, err, strings.TrimSpace(string(out))), fix)
	}
	return strings.TrimSpace(string(out))
}

// DiskFile makes a file for Loop that holds zeros.
func DiskFile(t testing.TB, bytes int64) string {
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

// LoopDevice makes a block device of a file. detach may be called before the test ends.
func LoopDevice(t testing.TB, file string) (device string, detach func()) {
	t.Helper()
	if os.Geteuid() != 0 {
		NeedsDisk(t, "a loop device wants root", "run the test as root")
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

// FormatDisk makes an ext4 on a device.
func FormatDisk(t testing.TB, device string) {
	t.Helper()
	run(t, "apt-get install e2fsprogs", "mkfs.ext4", "-q", "-m", "0", "-E", "nodiscard", device)
}

// MountDisk mounts an ext4 in a folder of the test's. unmount may be called before the test ends.
func MountDisk(t testing.TB, device string) (dir string, unmount func()) {
	t.Helper()
	dir = t.TempDir()
	if err := unix.Mount(device, dir, "ext4", 0, ""); err != nil {
		NeedsDisk(t, "mount: "+err.Error(), "run the test as root, or make guest")
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

// MappedDisk is a device of the device mapper.
type MappedDisk struct {
	t    testing.TB
	name string
	over atomic.Bool

	Path string
}

var mapped atomic.Int64

// MapDisk makes a device by a table.
func MapDisk(t testing.TB, table ...string) *MappedDisk {
	t.Helper()
	m := &MappedDisk{t: t, name: fmt.Sprintf("sluice-test-%d-%d", os.Getpid(), mapped.Add(1))}
	if out, err := m.setup(table, "create"); err != nil {
		NeedsDisk(t, fmt.Sprintf("dmsetup: %v: %s", err, out), "make guest has a kernel with the "+
			"device mapper")
	}
	t.Cleanup(m.Remove)
	// udev may be late with the name of ours, or not there.
	m.Path = "/dev/" + m.must(nil, "info", "--columns", "--noheadings", "-o", "blkdevname")
	return m
}

func (m *MappedDisk) setup(table []string, verb string, args ...string) (string, error) {
	c := exec.Command("dmsetup", append([]string{verb, m.name}, args...)...)
	if verb == "create" || verb == "remove" {
		c.Args = append(c.Args, "--noudevsync", "--noudevrules")
	}
	c.Stdin = strings.NewReader(strings.Join(table, "\n"))
	out, err := c.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

func (m *MappedDisk) must(table []string, verb string, args ...string) string {
	m.t.Helper()
	out, err := m.setup(table, verb, args...)
	if err != nil {
		m.t.Fatalf("dmsetup %s: %v: %s", verb, err, out)
	}
	return out
}

// Message sends a message to the device's first target.
func (m *MappedDisk) Message(text string) {
	m.t.Helper()
	m.must(nil, "message", "0", text)
}

// Become gives the device another table. Requests under way end by the old one.
func (m *MappedDisk) Become(table ...string) {
	m.t.Helper()
	m.must(table, "reload")
	m.must(nil, "resume", "--noflush", "--nolockfs", "--noudevsync")
}

// Remove ends the device. It is idempotent.
func (m *MappedDisk) Remove() {
	if m.over.Swap(true) {
		return
	}
	if out, err := m.setup(nil, "remove", "--retry"); err != nil {
		m.t.Errorf("dmsetup: %v: %s", err, out)
	}
}

// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// loopDevice makes a block device of a file, which it also returns. Without the right to,
// the test is skipped.
func loopDevice(t *testing.T, bytes int64) (device, file string) {
	t.Helper()
	file = filepath.Join(t.TempDir(), "disk")
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(bytes); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() != 0 {
		needs(t, "a loop device wants root")
	}
	out, err := exec.Command("losetup", "--find", "--show", file).CombinedOutput()
	if err != nil {
		needs(t, "losetup: "+err.Error()+": "+string(out))
	}
	device = strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if out, err := exec.Command("losetup", "--detach", device).CombinedOutput(); err != nil {
			t.Errorf("losetup: %v: %s", err, out)
		}
	})
	return device, file
}

// needs skips a test for what the machine, or the user, lacks.
func needs(t *testing.T, reason string) {
	t.Helper()
	drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "posix", Reason: reason, Fix: "run the test as root"})
}

// mountSmall mounts a new filesystem of so many bytes.
func mountSmall(t *testing.T, bytes int64) string {
	t.Helper()
	device, _ := loopDevice(t, bytes)
	if out, err := exec.Command("mkfs.ext4", "-q", "-m", "0", device).CombinedOutput(); err != nil {
		needs(t, "mkfs.ext4: "+err.Error()+": "+string(out))
	}
	dir := t.TempDir()
	if err := unix.Mount(device, dir, "ext4", 0, ""); err != nil {
		needs(t, "mount: "+err.Error())
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
			_ = unix.Unmount(dir, unix.MNT_DETACH)
		}
	})
	return dir
}

func TestBlockDevice(t *testing.T) {
	const size = 192 << 20
	device, _ := loopDevice(t, size)
	for _, v := range []struct {
		name string
		cfg  Config
		off  uint64
	}{{"ring", Config{Path: PathRing}, 0}, {"threads-odd", Config{Path: PathThreads}, 777}} {
		t.Run(v.name, func(t *testing.T) {
			h := harness(v.name, v.cfg, drivertest.DeviceMemory(device, size, v.off))
			h.Only = moving
			drivertest.Run(t, h)
		})
	}
	f, err := Open(device, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if n := f.Segment().Len; n != size {
		t.Errorf("a device of %d bytes has %d", size, n)
	}
	if err := f.Grow(2 * size); err == nil {
		t.Error("a device has grown")
	}
}

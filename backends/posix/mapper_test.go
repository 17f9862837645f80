// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sluicehq/sluice/driver"
)

// badDisk makes a disk of 8 MiB, of which the fifth answers all with EIO. It wants the device
// mapper, which the guest has.
func badDisk(t *testing.T) string {
	t.Helper()
	device, _ := loopDevice(t, 8<<20)
	name := fmt.Sprintf("sluice-test-%d", os.Getpid())
	const sector = 512
	table := strings.Join([]string{
		fmt.Sprintf("0 %d linear %s 0", 4<<20/sector, device),
		fmt.Sprintf("%d %d error", 4<<20/sector, 1<<20/sector),
		fmt.Sprintf("%d %d linear %s %d", 5<<20/sector, 3<<20/sector, device, 5<<20/sector),
	}, "\n")
	dmsetup := func(args ...string) ([]byte, error) {
		c := exec.Command("dmsetup", append(args, name, "--noudevsync", "--noudevrules")...)
		c.Stdin = strings.NewReader(table)
		return c.CombinedOutput()
	}
	if out, err := dmsetup("create"); err != nil {
		needs(t, "dmsetup: "+err.Error()+": "+strings.TrimSpace(string(out))+" (make guest has a kernel with the device mapper)")
	}
	t.Cleanup(func() {
		if out, err := dmsetup("remove", "--retry"); err != nil {
			t.Errorf("dmsetup: %v: %s", err, out)
		}
	})
	out, err := dmsetup("info", "--columns", "--noheadings", "-o", "blkdevname")
	if err != nil {
		t.Fatalf("dmsetup: %v: %s", err, out)
	}
	return filepath.Join("/dev", strings.TrimSpace(string(out))) // udev may be late with the name of ours, or not there
}

// TestRealBadSectors moves pieces to and from a disk of which a part fails: the pieces there are
// errors that name the offset, those elsewhere are whole.
func TestRealBadSectors(t *testing.T) {
	disk := badDisk(t)
	bothPaths(t, func(t *testing.T, cfg Config) {
		for _, buffered := range []bool{false, true} {
			cfg.Buffered, cfg.Durable = buffered, true
			f, err := Open(disk, OpenOptions{})
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			r := newRig(t, cfg, f.Segment(), 8<<20)
			good := []driver.Desc{{Len: 4 << 20}, {Local: 5 << 20, Remote: 5 << 20, Len: 3 << 20}}
			bad := driver.Desc{Local: 4 << 20, Remote: 4<<20 + 8192, Len: 4096}
			for _, op := range []driver.Op{driver.Read, driver.Write} { // a page that was not written stays in the cache
				if err := r.move(t, op, good...); err != nil {
					t.Errorf("%v of what is good, buffered %t: %v", op, buffered, err)
				}
				err := r.move(t, op, good[0], bad)
				var file *FileError
				if buffered && op == driver.Write { // the page cache took it
					if !errors.As(err, &file) || file.Op != "sync" || !errors.Is(err, syscall.EIO) {
						t.Errorf("a buffered write that no disk took: %v", err)
					}
				} else {
					wantFileError(t, err, 1, op.String(), int64(bad.Remote), syscall.EIO)
				}
			}
		}
	})
}

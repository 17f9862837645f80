// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/backends/posix"
	"github.com/sluicehq/sluice/internal/files"
	"github.com/sluicehq/sluice/internal/testing/machine"
)

// durable has a disk keep what Op.Durable told of.
func durable(change func(*Config)) func(*Config) {
	return func(c *Config) {
		change(c)
		c.Disks[0].Durable = true
	}
}

// TestRealPowerLoss has a disk log its writes and flushes, and puts it back to what it had each
// time when something was reported durable: the name of a new file, and every block as Op.Durable
// told.
func TestRealPowerLoss(t *testing.T) {
	powerLoss(t, posix.Config{Path: posix.PathRing}, 6, 1)
}

// TestSoakRealPowerLoss is the same by both ways to the disk, with more blocks and other ones each
// time.
func TestSoakRealPowerLoss(t *testing.T) {
	for _, path := range []posix.Path{posix.PathRing, posix.PathThreads} {
		t.Run(fmt.Sprint(path), func(t *testing.T) {
			powerLoss(t, posix.Config{Path: path}, 30, rand.Uint64())
		})
	}
}

// powerRoom is the room of the disk for blocks, of which powerKept are there at a time: places are
// used again and again.
const powerBytes, powerLog, powerRoom, powerKept = 32 << 20, 256 << 20, 8, 3

// powerLoss stores blocks one by one, removes as many as the seed says, and compares after each
// step.
func powerLoss(t *testing.T, way posix.Config, blocks int, seed uint64) {
	t.Logf("seed %d", seed)
	log := machine.DiskFile(t, powerLog)
	device, _ := machine.LoopDevice(t, machine.DiskFile(t, powerBytes))
	logDevice, detach := machine.LoopDevice(t, log)
	logged := machine.MapDisk(t, fmt.Sprintf("0 %d log-writes %s %s",
		powerBytes/machine.Sector, device, logDevice))
	machine.FormatDisk(t, logged.Path)
	dir, unmount := machine.MountDisk(t, logged.Path)
	told := storeAndMark(t, filepath.Join(dir, "disk"), way, blocks, seed, func(n int) {
		logged.Message("mark " + strconv.Itoa(n))
	})
	unmount()
	logged.Remove()
	detach()

	image, err := os.OpenFile(machine.DiskFile(t, powerBytes), os.O_RDWR, 0)
	require.NoError(t, err)
	defer image.Close()
	seen := 0
	require.NoError(t, replayLog(log, image, func(mark string) error {
		n, err := strconv.Atoi(mark)
		if err != nil {
			return nil // the kernel's own, at the end
		}
		seen++
		hasAfterPowerLoss(t, image.Name(), way, told[n], blocks)
		return nil
	}))
	require.Equal(t, len(told), seen)
}

// storeAndMark makes a cache and stores blocks, numbered from 1. It returns which of them were
// durable at each mark.
func storeAndMark(t *testing.T, path string, way posix.Config, blocks int, seed uint64,
	mark func(n int)) (told [][]uint64) {
	n := openBy(t, memoryFile(t), powerRoom, way, durable(withDisk(path, powerRoom)))
	n.place.Run = oddBytes
	var kept []uint64
	report := func() {
		require.EqualValues(t, len(kept), n.Stats().Disks[0].Blocks)
		mark(len(told))
		told = append(told, slices.Clone(kept))
	}
	report()
	random := rand.New(rand.NewPCG(seed, 0))
	for id := uint64(1); id <= uint64(blocks); id++ {
		if len(kept) == powerKept {
			at := random.IntN(powerKept)
			n.ns.Remove(keysOf(kept[at]))
			kept = slices.Delete(kept, at, at+1)
			report()
		}
		require.Equal(t, all(Done, 1), n.put(t, keysOf(id)))
		kept = append(kept, id)
		report()
	}
	n.close(t)
	return told
}

// hasAfterPowerLoss mounts a copy of a disk and opens a cache over the file there: what was durable
// is found, and nothing has other bytes than those that were stored.
func hasAfterPowerLoss(t *testing.T, image string, way posix.Config, told []uint64, blocks int) {
	content, err := os.ReadFile(image)
	require.NoError(t, err)
	copied := machine.DiskFile(t, powerBytes)
	require.NoError(t, os.WriteFile(copied, content, 0o600))
	defer os.Remove(copied)
	device, detach := machine.LoopDevice(t, copied)
	defer detach()
	dir, unmount := machine.MountDisk(t, device)
	defer unmount()
	path := filepath.Join(dir, "disk")
	require.FileExists(t, path)
	n := openBy(t, memoryFile(t), powerRoom, way, durable(withDisk(path, powerRoom)))
	n.place.Run = oddBytes
	defer n.close(t)
	require.Empty(t, n.Attached().Fresh+n.Stats().Disks[0].Fresh)
	for id := uint64(1); id <= uint64(blocks); id++ {
		outcome := n.get(t, keysOf(id))[0] // which compares the bytes
		if slices.Contains(told, id) {
			require.Equal(t, Done, outcome, "block %d, of which %v were durable", id, told)
		} else {
			require.Contains(t, []Outcome{Done, Missing, Damaged}, outcome)
		}
	}
}

// TestNewDiskKeepsItsName: the entry of a new file in its folder is synced, and a disk that fails
// then fails Open.
func TestNewDiskKeepsItsName(t *testing.T) {
	synced := ""
	var answer error
	syncEntry = func(f *os.File) error {
		synced = f.Name()
		return errors.Join(answer, files.SyncEntry(f))
	}
	defer func() { syncEntry = files.SyncEntry }()
	cfg := DiskConfig{Path: filepath.Join(t.TempDir(), "disk"), Bytes: 8 * blockBytes,
		Extent: 8 * blockBytes, Blocks: 16}
	d, err := openDisk(t.Context(), 0, cfg)
	require.NoError(t, err)
	require.Equal(t, cfg.Path, synced)
	require.NoError(t, d.close(false))
	cfg.Path += "2"
	answer = syscall.EIO
	_, err = openDisk(t.Context(), 0, cfg)
	require.ErrorIs(t, err, syscall.EIO)
}

// unwritten is how many pages of header and records the disk has not.
func unwritten(t *testing.T, f *os.File) uint64 {
	var s unix.Cachestat_t
	err := unix.Cachestat(uint(f.Fd()), &unix.CachestatRange{Len: 2 * headerBytes}, &s, 0)
	if errors.Is(err, unix.ENOSYS) {
		machine.NeedsDisk(t, "the kernel has no cachestat", "Linux 6.5 or later")
	}
	require.NoError(t, err)
	return s.Dirty + s.Writeback
}

// TestRecordsOfAKilledProcess: a process that was killed between the write of a record and its sync
// has left a block that counts as durable as soon as it is found. So the next one syncs first.
func TestRecordsOfAKilledProcess(t *testing.T) {
	path, file := memoryFile(t), filepath.Join(t.TempDir(), "disk")
	n := openNode(t, path, 16, durable(withDisk(file, 16)))
	require.Equal(t, all(Done, 4), n.put(t, ids(0, 4)))
	n.close(t)
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	record := make([]byte, recordBytes)
	_, err = f.ReadAt(record, headerBytes)
	require.NoError(t, err)
	dirty := false
	for range 100 { // the kernel may write a page back at once
		_, err = f.WriteAt(record, headerBytes)
		require.NoError(t, err)
		if dirty = unwritten(t, f) > 0; dirty {
			break
		}
	}
	if !dirty {
		machine.NeedsDisk(t, "the filesystem of TMPDIR counts no dirty pages", "TMPDIR on a disk")
	}
	n = openNode(t, path, 16, durable(withDisk(file, 16)))
	require.Zero(t, unwritten(t, f), "pages of header and records that the disk has not")
	require.Equal(t, all(Done, 4), n.get(t, ids(0, 4)))
}

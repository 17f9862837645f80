// SPDX-License-Identifier: Apache-2.0

package store

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/posix"
	"github.com/sluicehq/sluice/internal/testing/machine"
)

// TestRealPowerLoss has a disk log its writes and flushes, and puts it back to what it had each
// time when something was reported durable: the name of the new store, and every block as Begin
// or Commit said.
func TestRealPowerLoss(t *testing.T) {
	powerLoss(t, posix.Config{Path: posix.PathRing, Durable: true}, 6, 1)
}

// TestSoakRealPowerLoss is the same by both ways to the disk, with more blocks and other ones each
// time.
func TestSoakRealPowerLoss(t *testing.T) {
	for _, path := range []posix.Path{posix.PathRing, posix.PathThreads} {
		t.Run(fmt.Sprint(path), func(t *testing.T) {
			powerLoss(t, posix.Config{Path: path, Durable: true}, 20, rand.Uint64())
		})
	}
}

const powerBytes, powerLog = 32 << 20, 256 << 20

// powerLoss writes so many blocks, which the seed chooses, and compares after each of their steps.
func powerLoss(t *testing.T, cfg posix.Config, blocks int, seed uint64) {
	t.Logf("seed %d", seed)
	log := machine.DiskFile(t, powerLog)
	device, _ := machine.LoopDevice(t, machine.DiskFile(t, powerBytes))
	logDevice, detach := machine.LoopDevice(t, log)
	logged := machine.MapDisk(t, fmt.Sprintf("0 %d log-writes %s %s",
		powerBytes/machine.Sector, device,
		logDevice))
	machine.FormatDisk(t, logged.Path)
	dir, unmount := machine.MountDisk(t, logged.Path)
	said := writeAndMark(t, dir, cfg, written(blocks, seed), func(n int) {
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
		return hasAfterPowerLoss(t, image.Name(), said[n])
	}))
	require.Equal(t, len(said), seen)
}

// written chooses blocks of four, so that the same ones are written again and again.
func written(n int, seed uint64) []uint32 {
	random, blocks := rand.New(rand.NewPCG(seed, 0)), make([]uint32, n)
	for i := range blocks {
		blocks[i] = random.Uint32N(4)
	}
	return blocks
}

// writeAndMark makes a store and writes blocks. It returns what was reported durable at each mark.
func writeAndMark(t *testing.T, dir string, cfg posix.Config, blocks []uint32,
	mark func(n int)) (said []map[uint32]Block) {
	s, err := Create(filepath.Join(dir, "store"), killShape, Options{Durable: true})
	require.NoError(t, err)
	now := map[uint32]Block{}
	tell := func() {
		mark(len(said))
		copied := map[uint32]Block{}
		for i, b := range now {
			copied[i] = b
		}
		said = append(said, copied)
	}
	tell()
	w, err := newWriter(s, cfg)
	require.NoError(t, err)
	for _, i := range blocks {
		require.NoError(t, s.Begin(i))
		delete(now, i)
		tell()
		now[i], err = w.write(i)
		require.NoError(t, err)
		tell()
	}
	require.NoError(t, w.close())
	require.NoError(t, s.Close())
	return said
}

// hasAfterPowerLoss mounts a copy of a disk and compares the store there with what was said.
func hasAfterPowerLoss(t *testing.T, image string, said map[uint32]Block) error {
	content, err := os.ReadFile(image)
	require.NoError(t, err)
	copied := machine.DiskFile(t, powerBytes)
	require.NoError(t, os.WriteFile(copied, content, 0o600))
	defer os.Remove(copied)
	device, detach := machine.LoopDevice(t, copied)
	defer detach()
	dir, unmount := machine.MountDisk(t, device)
	defer unmount()
	path := filepath.Join(dir, "store")
	if _, err := os.Stat(path); err != nil {
		return err
	}
	has := verified(t, path)
	if len(has) != len(said) {
		return fmt.Errorf("%d blocks, %d were said to be there", len(has), len(said))
	}
	for i, b := range said {
		if has[i] != b {
			return fmt.Errorf("block %d is %+v, and was said to be %+v", i, has[i], b)
		}
	}
	return nil
}

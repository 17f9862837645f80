// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/disk"
)

// badDisk makes a disk of 8 MiB, of which the fifth answers all with EIO. It wants the device
// mapper, which the guest has.
func badDisk(t *testing.T) string {
	t.Helper()
	device, _ := disk.Loop(t, disk.File(t, 8<<20))
	const sector = disk.Sector
	return disk.Map(t,
		fmt.Sprintf("0 %d linear %s 0", 4<<20/sector, device),
		fmt.Sprintf("%d %d error", 4<<20/sector, 1<<20/sector),
		fmt.Sprintf("%d %d linear %s %d", 5<<20/sector, 3<<20/sector, device, 5<<20/sector)).Path
}

// TestRealBadSectors moves pieces to and from a disk of which a part fails: the pieces there are
// errors that name the offset, those elsewhere are whole.
func TestRealBadSectors(t *testing.T) {
	path := badDisk(t)
	bothPaths(t, func(t *testing.T, cfg Config) {
		for _, buffered := range []bool{false, true} {
			cfg.Buffered, cfg.Durable = buffered, true
			f, err := Open(path, OpenOptions{})
			require.NoError(t, err)
			defer f.Close()
			r := newRig(t, cfg, f.Segment(), 8<<20)
			good := []driver.Desc{{Len: 4 << 20}, {Local: 5 << 20, Remote: 5 << 20, Len: 3 << 20}}
			bad := driver.Desc{Local: 4 << 20, Remote: 4<<20 + 8192, Len: 4096}
			for _, op := range []driver.Op{driver.Read, driver.Write} {
				// a page that was not written stays in the cache
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

// TestRealDurableOnAFlakyDisk has a disk refuse writes now and then. Whatever was reported durable
// is on the disk, also where a sync failed and the next one succeeded.
func TestRealDurableOnAFlakyDisk(t *testing.T) { durableOnAFlakyDisk(t, 1, 15) }

// TestSoakRealDurableOnAFlakyDisk is the same for longer, of another seed each time.
func TestSoakRealDurableOnAFlakyDisk(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	durableOnAFlakyDisk(t, seed, 150)
}

func durableOnAFlakyDisk(t *testing.T, seed uint64, rounds int) {
	const size = 1 << 20
	file := disk.File(t, size)
	device, _ := disk.Loop(t, file)
	good := fmt.Sprintf("0 %d linear %s 0", size/disk.Sector, device)
	bad := fmt.Sprintf("0 %d flakey %s 0 0 3600 1 error_writes", size/disk.Sector, device)
	flaky := disk.Map(t, bad) // the kernel has both
	bothPaths(t, func(t *testing.T, cfg Config) {
		for _, cfg.Buffered = range []bool{true, false} {
			t.Run(fmt.Sprintf("buffered %t", cfg.Buffered), func(t *testing.T) {
				flaky.Become(good)
				f, err := Open(flaky.Path, OpenOptions{})
				require.NoError(t, err)
				defer f.Close()
				defer flaky.Become(good)
				r := newRig(t, cfg, f.Segment(), size)
				r.writeDurably(t, file, rand.New(rand.NewPCG(seed, 1)), rounds, func(fails bool) {
					flaky.Become(map[bool]string{true: bad, false: good}[fails])
				})
			})
		}
	})
}

// writeDurably writes parts in rounds, and compares those that ended well with what the disk has.
// In each round the disk begins to fail before one of the writes, and stops before another.
func (r *rig) writeDurably(t *testing.T, file string, random *rand.Rand, rounds int,
	disk func(fails bool)) {
	const part, batch = 4 << 10, 16
	parts := len(r.mem) / part
	lost, kept := 0, 0
	for range rounds {
		list, fails, works := random.Perm(parts)[:batch], random.IntN(batch), random.IntN(batch)
		for n, i := range list {
			if n == fails || n == works {
				disk(n == fails)
			}
			copy(r.mem[i*part:], bytes.Repeat([]byte{byte(random.Uint32())}, part))
			r.durableWrite(t, uint64(i), uint64(i), part)
		}
		ended := map[uint64]error{}
		for end := time.Now().Add(time.Minute); len(ended) < batch; {
			require.True(t, time.Now().Before(end), "%d of %d writes end", len(ended), batch)
			n, err := r.b.Poll(r.done[:])
			require.NoError(t, err)
			for _, c := range r.done[:n] {
				ended[c.Tag] = c.Err
			}
			if n == 0 {
				time.Sleep(50 * time.Microsecond)
			}
		}
		has, err := os.ReadFile(file)
		require.NoError(t, err)
		for i, err := range ended {
			if err != nil {
				require.ErrorIs(t, err, syscall.EIO)
				lost++
				continue
			}
			kept++
			at := int(i) * part
			require.Equal(t, r.mem[at:at+part], has[at:at+part], "part %d was reported durable", i)
		}
	}
	t.Logf("%d writes reported durable, %d failed", kept, lost)
	require.NotZero(t, lost)
	require.NotZero(t, kept)
}

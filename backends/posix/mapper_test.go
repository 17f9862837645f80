// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/testing/machine"
)

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
	file := machine.DiskFile(t, size)
	device, _ := machine.LoopDevice(t, file)
	good := fmt.Sprintf("0 %d linear %s 0", size/machine.Sector, device)
	bad := fmt.Sprintf("0 %d flakey %s 0 0 3600 1 error_writes", size/machine.Sector, device)
	flaky := machine.MapDisk(t, bad) // the kernel has both
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

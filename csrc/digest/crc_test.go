// SPDX-License-Identifier: Apache-2.0

package digest

import (
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// allCRC are the ways of this machine, and the one that was chosen.
func allCRC() []crcWay { return append(crcWays(), crcOfGo, updateCRC32C) }

// TestCRC32C has bytes of any length, at any address, in one part and in two.
func TestCRC32C(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	mem := make([]byte, 40<<10)
	for i := range mem {
		mem[i] = byte(rng.Uint32())
	}
	t.Logf("%d ways of C", len(crcWays()))
	for i := range 4000 {
		n := min(rng.IntN(1<<(1+i%16)), len(mem))
		p := mem[rng.IntN(len(mem)-n+1):][:n]
		cut, sum := rng.IntN(n+1), rng.Uint32()
		want := crc32.Update(sum, castagnoli, p)
		for k, w := range allCRC() {
			require.Equal(t, want, w(sum, p), "way %d, %d bytes", k, n)
			require.Equal(t, want, w(w(sum, p[:cut]), p[cut:]), "way %d, %d of %d bytes", k, cut, n)
		}
	}
}

func TestCRC32COfNothing(t *testing.T) {
	for _, w := range allCRC() {
		require.Equal(t, uint32(7), w(7, nil))
	}
	zeros := make([]byte, crcCrossing)
	require.Equal(t, crc32.Checksum(zeros, castagnoli), CRC32C(zeros))
}

func FuzzCRC32C(f *testing.F) {
	f.Add(uint32(1), []byte("keys and values"))
	f.Fuzz(func(t *testing.T, sum uint32, p []byte) {
		for _, w := range allCRC() {
			require.Equal(t, crc32.Update(sum, castagnoli, p), w(sum, p))
		}
	})
}

// BenchmarkCRC32C sums from the caches and from memory, by each way.
func BenchmarkCRC32C(b *testing.B) {
	mem := make([]byte, 256<<20)
	for i := range mem {
		mem[i] = byte(i * 7)
	}
	for _, piece := range []int{crcCrossing, 64 << 10, 1 << 20} {
		for _, size := range []int{1 << 20, len(mem)} {
			for k, w := range allCRC() {
				b.Run(fmt.Sprintf("%dKiB/%dMiB/%d", piece>>10, size>>20, k), func(b *testing.B) {
					b.SetBytes(int64(size))
					for range b.N {
						for at := 0; at < size; at += piece {
							w(0, mem[at:][:piece])
						}
					}
				})
			}
		}
	}
}

// TestCRC32CFaults sums memory of which the last page is protected: each way panics as Go's does.
func TestCRC32CFaults(t *testing.T) {
	const n = 1 << 16
	mem, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Munmap(mem)) }()
	require.NoError(t, unix.Mprotect(mem[n-4096:], unix.PROT_NONE))
	for _, w := range allCRC() {
		err := func() (err error) {
			defer hostmem.CatchFault(&err, hostmem.PanicOnFault())
			w(0, mem)
			return nil
		}()
		require.ErrorIs(t, err, driver.ErrFault)
		require.Equal(t, crc32.Update(0, castagnoli, mem[:n-4096]), w(0, mem[:n-4096]))
	}
}

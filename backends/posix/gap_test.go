// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// BenchmarkGap reads 1,024 entries of 656 bytes that lie so far apart, each batch elsewhere
// in a file of 1 GiB, with each Config.GapMax: where the figures cross, that gap costs as
// much as a request.
func BenchmarkGap(b *testing.B) {
	const size, entries, entry = 1 << 30, 1024, 656
	f := newFile(b, b.TempDir(), size)
	block := make([]byte, 4<<20)
	for i := range block {
		block[i] = byte(i)
	}
	for off := int64(0); off < size; off += int64(len(block)) {
		if _, err := f.WriteAt(block, off); err != nil {
			b.Fatal(err)
		}
	}
	if err := f.Sync(); err != nil {
		b.Fatal(err)
	}
	for _, gap := range []uint64{2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 56 << 10} {
		for _, most := range []int{-1, 64 << 10} {
			b.Run(fmt.Sprintf("gap=%d/most=%d", gap, most), func(b *testing.B) {
				r := newRig(b, Config{GapMax: most}, fileSegment(f, size), entries*entry)
				g := driver.Pattern{Run: entry, Count: entries, Local: driver.Side{Stride: entry},
					Remote: driver.Side{Stride: entry + gap}, LocalKey: r.local,
					RemoteKey: r.remote}
				batch := driver.Batch{Op: driver.Read, Pattern: &g}
				for b.Loop() {
					g.Remote.Base = rand.Uint64N(size - entries*(entry+gap))
					if err := r.p.Submit(1, &batch); err != nil {
						b.Fatal(err)
					}
					for n := 0; n == 0; {
						var err error
						if n, err = r.b.Poll(r.done[:1]); err != nil || n == 1 &&
							r.done[0].Err != nil {
							b.Fatal(err, r.done[0].Err)
						}
						if n == 0 {
							poll := [1]unix.PollFd{{Fd: int32(r.b.FD()), Events: unix.POLLIN}}
							if ready, err := r.b.Arm(); !ready && err == nil {
								_, _ = unix.Poll(poll[:], 100)
							}
							var drained [8]byte
							_, _ = unix.Read(r.b.FD(), drained[:])
						}
					}
				}
				b.SetBytes(entries * entry)
			})
		}
	}
}

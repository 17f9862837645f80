// SPDX-License-Identifier: Apache-2.0

package ring

import (
	"fmt"
	"path/filepath"
	"strconv"
	"testing"
)

// BenchmarkRing puts objects, each of which goes for the next, and has each reader get them. Beside
// it is Go's copy of the same bytes into memory of the ring.
func BenchmarkRing(b *testing.B) {
	for _, size := range []int{64, 64 << 10, 9 << 20} {
		for _, readers := range []int{1, 4, 16} {
			b.Run(fmt.Sprintf("size=%d/readers=%d", size, readers), func(b *testing.B) {
				w, err := Open(Config{Path: filepath.Join(b.TempDir(), "ring"), Await: readers,
					Bytes: uint64(max(8*size, 1<<20))})
				if err != nil {
					b.Fatal(err)
				}
				defer w.Close()
				var all []*Reader
				for range readers {
					r, err := Join(b.Context(), w.cfg.Path)
					if err != nil {
						b.Fatal(err)
					}
					defer r.Close()
					all = append(all, r)
				}
				object := make([]byte, size)
				b.SetBytes(int64(size))
				b.Run("copy", func(b *testing.B) {
					b.SetBytes(int64(size))
					for at := 0; b.Loop(); at = (at + size) % (7*size + 1) {
						copy(w.data[at:], object)
					}
				})
				b.Run("put", func(b *testing.B) {
					b.SetBytes(int64(size))
					b.ReportAllocs()
					for i := 0; b.Loop(); i++ {
						h, err := w.Put(over, strconv.Itoa(i), object)
						if err != nil {
							b.Fatal(err)
						}
						for _, r := range all {
							o, err := r.Get(h)
							if err != nil || o.Close() != nil {
								b.Fatal(err)
							}
						}
					}
					w.Clear()
				})
			})
		}
	}
}

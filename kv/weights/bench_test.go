// SPDX-License-Identifier: Apache-2.0

package weights

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// onDisk puts files of tensors of n bytes each into a folder, from where they come out of the page cache.
func onDisk(b *testing.B, files, tensors, n int) (list []Source, total int64) {
	b.Helper()
	data := make([]byte, n)
	for f := range files {
		name := filepath.Join(b.TempDir(), "shard")
		out, err := os.Create(name)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = out.Close() })
		var all []Tensor
		for i := range tensors {
			all = append(all, Tensor{Name: string(rune('a'+f)) + "." + string(rune('0'+i)), Type: "U8", Shape: []uint64{uint64(n)}})
		}
		if err := Write(out, all, nil, func(Tensor) (io.Reader, error) { return bytes.NewReader(data), nil }); err != nil {
			b.Fatal(err)
		}
		info, err := out.Stat()
		if err != nil {
			b.Fatal(err)
		}
		list = append(list, Source{name, out, info.Size()})
		total += int64(tensors * n)
	}
	return list, total
}

// plainly reads all files one after the other, in reads of a piece each.
func plainly(b *testing.B, files []Source, memory []byte) {
	b.Helper()
	for _, src := range files {
		for at := int64(0); at < src.Size; at += pieceDefault {
			n := min(pieceDefault, src.Size-at)
			if _, err := src.ReadAt(memory[:n], at); err != nil && err != io.EOF {
				b.Fatal(err)
			}
			memory = memory[n:]
		}
	}
}

// BenchmarkLoad is beside one goroutine that reads the same files in reads of the same size, in turn: x-plain is the
// median of the ratios of their times, and less is better.
func BenchmarkLoad(b *testing.B) {
	for _, c := range []struct {
		name       string
		tensors, n int
		readers    int
	}{{"large/readers=1", 2, 32 << 20, 1}, {"large/readers=4", 2, 32 << 20, 4}, {"small/readers=1", 1000, 64 << 10, 1}, {"small/readers=4", 1000, 64 << 10, 4}} {
		b.Run(c.name, func(b *testing.B) {
			files, total := onDisk(b, 2, c.tensors, c.n)
			m, err := Open(files...)
			if err != nil {
				b.Fatal(err)
			}
			memory := make([]byte, total+1<<20)
			var ratios []float64
			b.SetBytes(total)
			plainly(b, files, memory)
			for b.Loop() {
				start := time.Now()
				plainly(b, files, memory)
				middle := time.Now()
				l := load(b, m, Config{Memory: memory, Readers: c.readers})
				for _, err := range l.All(b.Context()) {
					if err != nil {
						b.Fatal(err)
					}
				}
				ratios = append(ratios, float64(time.Since(middle))/float64(middle.Sub(start)))
				if err := l.Close(); err != nil {
					b.Fatal(err)
				}
			}
			slices.Sort(ratios)
			b.ReportMetric(ratios[len(ratios)/2], "x-plain")
		})
	}
}

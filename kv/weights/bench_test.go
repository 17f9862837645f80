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

// onDisk puts files of tensors of n bytes each into a folder, from where they come out of the page
// cache.
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
			all = append(all, Tensor{Name: string(rune('a'+f)) + "." + string(rune('0'+i)),
				Type: "U8", Shape: []uint64{uint64(n)}})
		}
		if err := Write(out, all, nil, func(Tensor) (io.Reader, error) {
			return bytes.NewReader(data), nil
		}); err != nil {
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

// plainly reads the tensors of all files one after the other, in reads of a piece each.
func plainly(b *testing.B, m *Model, memory []byte) {
	b.Helper()
	begins := make([]int64, len(m.sources))
	for _, t := range slices.Backward(m.tensors) {
		begins[t.file] = t.offset
	}
	for i, src := range m.sources {
		for at := begins[i]; at < src.Size; at += pieceDefault {
			n := min(pieceDefault, src.Size-at)
			if _, err := src.ReadAt(memory[:n], at); err != nil && err != io.EOF {
				b.Fatal(err)
			}
			memory = memory[n:]
		}
	}
}

func loadAll(b *testing.B, m *Model, cfg Config) {
	b.Helper()
	l, err := m.Load(b.Context(), cfg)
	if err != nil {
		b.Fatal(err)
	}
	for _, err := range l.All(b.Context()) {
		if err != nil {
			b.Fatal(err)
		}
	}
	if err := l.Close(); err != nil {
		b.Fatal(err)
	}
}

// BenchmarkLoad is beside one goroutine that reads the same files in reads of the same size, in
// turn: x-plain is the median of the ratios of their times, and less is better.
func BenchmarkLoad(b *testing.B) {
	for _, c := range []struct {
		name       string
		tensors, n int
		readers    int
	}{{"large/readers=1", 2, 32 << 20, 1}, {"large/readers=4", 2, 32 << 20, 4},
		{"small/readers=1", 1000, 64 << 10, 1}, {"small/readers=4", 1000, 64 << 10, 4}} {
		b.Run(c.name, func(b *testing.B) {
			files, total := onDisk(b, 2, c.tensors, c.n)
			m, err := Open(files...)
			if err != nil {
				b.Fatal(err)
			}
			memory := make([]byte, total+1<<20)
			var ratios []float64
			b.SetBytes(2 * total)
			plainly(b, m, memory)
			for i := 0; b.Loop(); i++ {
				var plain, ours time.Duration
				for _, first := range []bool{i%2 == 0, i%2 != 0} {
					start := time.Now()
					if first {
						plainly(b, m, memory)
						plain = time.Since(start)
						continue
					}
					loadAll(b, m, Config{Memory: memory, Readers: c.readers})
					ours = time.Since(start)
				}
				ratios = append(ratios, float64(ours)/float64(plain))
			}
			slices.Sort(ratios)
			b.ReportMetric(ratios[len(ratios)/2], "x-plain")
		})
	}
}

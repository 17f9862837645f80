// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestDefaultShapesFitTheMemory(t *testing.T) {
	for name, shapes := range map[string]func(uint64, bool) []Shape{"pairs": Shapes,
		"files": FileShapes} {
		const memory = 512 << 20
		seen := map[Shape]bool{}
		for _, s := range shapes(memory, false) {
			if seen[s] || s.Bytes() > memory/2 || s.Check() != nil {
				t.Errorf("%s: %s: twice, or too large", name, &s)
			}
			seen[s] = true
		}
		quick := shapes(memory, true)
		for _, s := range quick {
			if !seen[s] {
				t.Errorf("%s: %s is in the quick run alone", name, &s)
			}
		}
		if len(quick) == 0 || len(quick) >= len(seen) {
			t.Errorf("%s: %d of %d shapes are quick", name, len(quick), len(seen))
		}
	}
	list := Shapes(512<<20, false)
	for _, want := range []Shape{{Op: OpWrite, Size: 656, Batch: 2048, Where: Scattered},
		{Op: OpRead, Size: 64 << 10, Batch: 2048, Where: Adjacent},
		{Op: OpWrite, Size: 1 << 20, Batch: 256, Where: Scattered},
		{Op: OpWrite, Size: 16 << 20, Batch: 1, Where: Scattered}} {
		if want.Spread = 512 << 20; !slices.Contains(list, want) {
			t.Errorf("%s is missing", &want)
		}
	}
	if list := Shapes(2<<20, false); len(list) == 0 || list[len(list)-1].Batch != 1 {
		t.Errorf("little memory: %v", list)
	}
}

// TestPlacesOfEachKind: within the memory, the same for each participant, and threads meet at none.
func TestPlacesOfEachKind(t *testing.T) {
	for _, where := range []string{Adjacent, Scattered, Shuffled, Pages, Gathered, Hot} {
		for _, s := range []Shape{{Size: 656, Batch: 2048}, {Size: 4096, Batch: 1, Threads: 3},
			{Size: 64, Batch: 16, Threads: 2}, {Size: 4 << 20, Batch: 2}} {
			s.Op, s.Where, s.Spread = OpWrite, where, 32<<20
			t.Run(fmt.Sprint(where, s.Size), func(t *testing.T) {
				local, remote := s.places()
				again, _ := s.places()
				n := s.threads()
				if len(local) < n || len(local)%n != 0 || len(local) != len(remote) ||
					!slices.Equal(local[0], again[0]) {
					t.Fatalf("%d and %d lists", len(local), len(remote))
				}
				here, there := s.memory()
				for i, side := range [][][]int32{local, remote} {
					room := []uint64{here, there}[i]
					taken := map[int32]int{} // by thread
					for l, list := range side {
						require.EqualValues(t, s.Batch, len(list), "pieces")
						seen := map[int32]bool{}
						for _, slot := range list {
							by, ok := taken[slot]
							if (uint64(slot)+1)*s.Size > room || ok && by != l%n ||
								seen[slot] && where != Hot {
								t.Fatalf("slot %d of list %d is outside, or taken", slot, l)
							}
							taken[slot], seen[slot] = l%n, true
						}
					}
				}
				run := func(list []int32) bool {
					return !slices.ContainsFunc(list, func(s int32) bool {
						return s != list[0]+int32(slices.Index(list, s))
					})
				}
				here64 := here == s.Size*uint64(n*s.Batch)
				if where == Adjacent && !(run(local[0]) && run(remote[0])) ||
					where == Pages && !(here64 && run(local[0])) ||
					where == Shuffled && !run(local[0]) {
					t.Errorf("places %v, %v", local[0], remote[0])
				}
			})
		}
	}
}

func TestShapesThatCannotBe(t *testing.T) {
	good := Shape{Op: OpWrite, Size: 656, Batch: 64, Where: Pages}
	require.NoError(t, good.Check())
	for says, change := range map[string]func(*Shape){
		"read, durable or match": func(s *Shape) { s.Op = "move" },
		"size 0":                 func(s *Shape) { s.Size = 0 },
		"batch 0":                func(s *Shape) { s.Batch = 0 },
		"-1 threads":             func(s *Shape) { s.Threads = -1 },
		"spread":                 func(s *Shape) { s.Spread = 8 << 30 },
		"in all":                 func(s *Shape) { s.Size, s.Batch = 1<<30, 5 },
	} {
		s := good
		change(&s)
		if err := s.Check(); !errors.Is(err, ErrShape) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", says, err)
		}
	}
}

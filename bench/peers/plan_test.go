// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"slices"
	"testing"
)

func TestShapesFitTheMemory(t *testing.T) {
	const most = 256 << 20
	seen := map[Shape]bool{}
	for _, s := range Shapes(most, false) {
		if seen[s] || s.Bytes() > most {
			t.Errorf("%s: twice, or too large", &s)
		}
		seen[s] = true
	}
	for _, want := range []Shape{{"write", 656, 2048, false}, {"read", 64 << 10, 2048, true},
		{"write", 1 << 20, 256, false}, {"read", 16 << 20, 16, false},
		{"write", 16 << 20, 1, false}} {
		if !seen[want] {
			t.Errorf("%s is missing", &want)
		}
	}
	if seen[Shape{"write", 656, 1, true}] {
		t.Error("a single piece is measured adjacent, too")
	}
	quick := Shapes(most, true)
	for _, s := range quick {
		if !seen[s] {
			t.Errorf("%s is in the quick run alone", &s)
		}
	}
	if len(quick) < 8 || len(quick) > len(seen)/3 {
		t.Errorf("%d of %d shapes are quick", len(quick), len(seen))
	}
	if list := Shapes(1<<20, false); len(list) == 0 || list[len(list)-1].Batch != 1 {
		t.Errorf("little memory: %v", list)
	}
}

func TestPlacesAreNeverTakenTwice(t *testing.T) {
	const memory = 8 << 20
	for _, s := range []Shape{{"write", 656, 2048, false}, {"read", 656, 2048, true},
		{"write", 4096, 1, false}, {"write", 4 << 20, 1, false}} {
		local, remote := s.places(memory)
		again, _ := s.places(memory)
		if len(local) == 0 || len(local) != len(remote) {
			t.Fatalf("%s: %d and %d lists", &s, len(local), len(remote))
		}
		for _, side := range [][][]int32{local, remote} {
			taken := map[int32]bool{}
			for _, list := range side {
				if len(list) != s.Batch {
					t.Fatalf("%s: %d pieces", &s, len(list))
				}
				for i, slot := range list {
					if taken[slot] || slot < 0 || (uint64(slot)+1)*s.Size > memory {
						t.Fatalf("%s: slot %d is taken twice, or outside", &s, slot)
					}
					if s.Adjacent && i > 0 && slot != list[i-1]+1 {
						t.Fatalf("%s: slot %d after %d", &s, slot, list[i-1])
					}
					taken[slot] = true
				}
			}
		}
		if again[0][0] != local[0][0] {
			t.Errorf("%s: drawn anew", &s)
		}
	}
}

func TestFileShapesFitTheFile(t *testing.T) {
	full, quick := FileShapes(64<<20, false), FileShapes(64<<20, true)
	for _, want := range []Shape{{"write", 4 << 10, 64, false}, {"read", 4 << 10, 2048, false},
		{"read", 64 << 10, 64, false}, {"write", 1 << 20, 16, false}, {"read", 656, 2048, false}} {
		if !slices.Contains(full, want) {
			t.Errorf("%s is missing", &want)
		}
	}
	for _, s := range quick {
		if !slices.Contains(full, s) {
			t.Errorf("%s is in the quick run alone", &s)
		}
	}
	if len(quick) == 0 || len(quick) >= len(full) {
		t.Errorf("%d of %d shapes are quick", len(quick), len(full))
	}
	for _, s := range FileShapes(2<<20, false) {
		if s.Bytes() > 2<<20 {
			t.Errorf("%s is too large", &s)
		}
	}
}

// TestTellingShapesComeFirst: of each size before all of one.
func TestTellingShapesComeFirst(t *testing.T) {
	list := Shapes(256<<20, false)
	want := slices.Clone(list)
	slices.SortStableFunc(list, tellingFirst)
	quick := Shapes(256<<20, true)
	if !slices.Equal(list[:len(quick)], quick) {
		t.Errorf("the first are %v", list[:len(quick)])
	}
	r := &Report{Rows: []Row{{Peer: "before"}}}
	for _, s := range list {
		r.Rows = append(r.Rows, Row{Peer: "a", Shape: s}, Row{Peer: "b", Shape: s})
	}
	r.Rows = slices.Insert(r.Rows, 3, Row{Peer: "out"})
	r.order(1, want)
	if last := r.Rows[len(r.Rows)-1]; r.Rows[0].Peer != "before" || last.Peer != "out" {
		t.Errorf("the first row is %+v, the last %+v", r.Rows[0], last)
	}
	for i, s := range want {
		if a, b := r.Rows[1+2*i], r.Rows[2+2*i]; a.Shape != s || b.Shape != s || a.Peer != "a" ||
			b.Peer != "b" {
			t.Errorf("%s: %+v, %+v", &s, a, b)
		}
	}
}

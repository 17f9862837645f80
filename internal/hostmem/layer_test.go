// SPDX-License-Identifier: Apache-2.0

package hostmem

import "testing"

// FuzzSpans compares the set with an array of flags.
func FuzzSpans(f *testing.F) {
	f.Add([]byte{0, 4, 8, 4, 4, 4})
	f.Add([]byte{10, 1, 12, 1, 11, 1, 0, 200})
	f.Add([]byte{5, 5, 5, 5, 4, 7})
	f.Fuzz(func(t *testing.T, ops []byte) {
		var set spans
		var flags [512]bool
		for ; len(ops) >= 2; ops = ops[2:] {
			off, n := uint64(ops[0]), uint64(ops[1])+1
			want := false
			for i := off; i < off+n; i++ {
				want = want || flags[i]
				flags[i] = true
			}
			if got := set.overlaps(off, n); got != want {
				t.Fatalf("[%d, +%d) overlaps %v: %v", off, n, set, got)
			}
			if ops[0]%3 == 0 {
				set.remove(off, n)
				clear(flags[off : off+n])
			} else {
				set.add(off, n)
			}
			checkSpans(t, set, flags)
		}
	})
}

func checkSpans(t *testing.T, set spans, flags [512]bool) {
	t.Helper()
	var got [512]bool
	for i, s := range set {
		if s.from >= s.to || i > 0 && s.from <= set[i-1].to {
			t.Fatalf("out of order, empty or touching: %v", set)
		}
		for b := s.from; b < s.to; b++ {
			got[b] = true
		}
	}
	if got != flags {
		t.Fatalf("%v holds other bytes than were added", set)
	}
}

// FuzzSplice compares the pieces with a layer number for each byte.
func FuzzSplice(f *testing.F) {
	f.Add([]byte{0, 64, 1, 10, 4, 2, 12, 1, 1})
	f.Fuzz(func(t *testing.T, ops []byte) {
		const size = 64
		layers := []*layer{{}, {}, {}}
		pieces := []piece{{0, size, layers[0]}}
		var want [size]*layer
		for i := range want {
			want[i] = layers[0]
		}
		for ; len(ops) >= 3; ops = ops[3:] {
			off := uint64(ops[0]) % size
			n := min(uint64(ops[1])%size+1, size-off)
			l := layers[ops[2]%3]
			pieces = splice(pieces, piece{off, n, l})
			for i := off; i < off+n; i++ {
				want[i] = l
			}
			at := uint64(0)
			for i, p := range pieces {
				if p.off != at || p.len == 0 || i > 0 && pieces[i-1].layer == p.layer {
					t.Fatalf("gap, overlap, nothing or an unjoined neighbour at %d: %v", at, pieces)
				}
				for ; at < p.end(); at++ {
					if want[at] != p.layer {
						t.Fatalf("byte %d lies in the wrong layer", at)
					}
				}
			}
			if at != size {
				t.Fatalf("the pieces end at %d of %d", at, size)
			}
		}
	})
}

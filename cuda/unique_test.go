// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// checkUnique compares with a map.
func checkUnique[T uint32 | uint64](t *testing.T, list, unique []T, at []uint32, n int, skip T) {
	t.Helper()
	var want []T
	places := map[T]uint32{}
	for i, index := range list {
		if index == skip {
			if at[i] != Skip32 {
				t.Fatalf("a skip became %d", at[i])
			}
			continue
		}
		if _, known := places[index]; !known {
			places[index] = uint32(len(want))
			want = append(want, index)
		}
		if at[i] != places[index] {
			t.Fatalf("index %d of %v is at %d, want %d", i, list, at[i], places[index])
		}
	}
	if !slices.Equal(unique[:n], want) {
		t.Fatalf("%v, want %v", unique[:n], want)
	}
}

func TestUniqueEqualsAMap(t *testing.T) {
	u, err := NewUnique(3000)
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(41, 42))
	for _, n := range []int{0, 1, 2, 17, 3000} {
		for _, among := range []uint64{1, 7, 5000, math.MaxUint32} {
			wide, narrow, at := make([]uint64, n), make([]uint32, n), make([]uint32, n+3)
			for i := range wide {
				narrow[i] = uint32(rng.Uint64N(among))
				wide[i] = uint64(narrow[i]) << (narrow[i] % 40)
				if rng.IntN(9) == 0 {
					narrow[i], wide[i] = Skip32, Skip64
				}
				if rng.IntN(9) == 0 {
					wide[i] = Skip32 // an index like any other
				}
			}
			unique := make([]uint32, n)
			got, err := u.U32(narrow, unique, at)
			if err != nil {
				t.Fatal(err)
			}
			checkUnique(t, narrow, unique, at, got, Skip32)
			uniqueWide := make([]uint64, n+1)
			if got, err = u.U64(wide, uniqueWide, at); err != nil {
				t.Fatal(err)
			}
			checkUnique(t, wide, uniqueWide, at, got, Skip64)
		}
	}
}

// TestUniqueThenFanOut: fetched once and spread, all is as if fetched for each.
func TestUniqueThenFanOut(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 7))
	pool, list := random(rng, 500*656), make([]uint32, 4*200)
	for i := range list {
		list[i] = rng.Uint32N(220) // four tokens that ask for much the same
	}
	list[3] = Skip32
	want := make([]byte, len(list)*656)
	wantTally, err := Gather(want, pool, 656, Index{U32: list})
	if err != nil {
		t.Fatal(err)
	}
	u, err := NewUnique(len(list))
	if err != nil {
		t.Fatal(err)
	}
	unique, at := make([]uint32, len(list)), make([]uint32, len(list))
	n, err := u.U32(list, unique, at)
	if err != nil || n > 220 {
		t.Fatalf("%d, %v", n, err)
	}
	scratch, got := make([]byte, n*656), make([]byte, len(want))
	if _, err := Gather(scratch, pool, 656, Index{U32: unique[:n]}); err != nil {
		t.Fatal(err)
	}
	gotTally, err := Gather(got, scratch, 656, Index{U32: at})
	if err != nil || gotTally != wantTally || !bytes.Equal(got, want) {
		t.Errorf("%+v, %v, want %+v", gotTally, err, wantTally)
	}
}

func TestUniqueBounds(t *testing.T) {
	for _, n := range []int{0, -1, uniqueMax + 1} {
		if _, err := NewUnique(n); !errors.Is(err, driver.ErrBounds) {
			t.Errorf("%d indices: %v", n, err)
		}
	}
	u, err := NewUnique(4)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range [][3]int{{5, 5, 5}, {4, 3, 4}, {4, 4, 3}} {
		if _, err := u.U32(make([]uint32, n[0]), make([]uint32, n[1]), make([]uint32, n[2])); err != driver.ErrBounds {
			t.Errorf("U32 of %v: %v", n, err)
		}
		if _, err := u.U64(make([]uint64, n[0]), make([]uint64, n[1]), make([]uint32, n[2])); err != driver.ErrBounds {
			t.Errorf("U64 of %v: %v", n, err)
		}
	}
}

// TestUniqueForgets what earlier lists had, also when the stamp begins anew.
func TestUniqueForgets(t *testing.T) {
	u, err := NewUnique(8)
	if err != nil {
		t.Fatal(err)
	}
	at := make([]uint32, 8)
	unique := make([]uint32, 8)
	for _, stamp := range []uint32{0, math.MaxUint32 - 2} {
		u.stamp = stamp
		for i := range uint32(4) {
			list := []uint32{i, i, 9, 0}
			n, err := u.U32(list, unique, at)
			if err != nil {
				t.Fatal(err)
			}
			checkUnique(t, list, unique, at, n, Skip32)
		}
	}
}

// TestUniqueBeginsAnew where empty slots would look like those of index 0.
func TestUniqueBeginsAnew(t *testing.T) {
	u, err := NewUnique(2)
	if err != nil {
		t.Fatal(err)
	}
	u.stamp = math.MaxUint32
	list, unique, at := []uint32{5, 0}, make([]uint32, 2), make([]uint32, 2)
	if u.begin(2, 2, 2) != nil || u.stamp != 1 {
		t.Fatalf("stamp %d", u.stamp)
	}
	checkUnique(t, list, unique, at, find(u, list, unique, at, Skip32), Skip32)
}

func TestUniqueDoesNotAllocate(t *testing.T) {
	u, err := NewUnique(100)
	if err != nil {
		t.Fatal(err)
	}
	list, unique, at := make([]uint32, 100), make([]uint32, 100), make([]uint32, 100)
	wide, uniqueWide := make([]uint64, 100), make([]uint64, 100)
	if n := testing.AllocsPerRun(50, func() {
		_, _ = u.U32(list, unique, at)
		_, _ = u.U64(wide, uniqueWide, at)
	}); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}

// BenchmarkUnique is what finding the different ones costs, beside a map of Go that is used again, and
// beside the twin's gather of as many entries, which it saves; lists of which one in that many is new.
func BenchmarkUnique(b *testing.B) {
	pool := alloc(b, 1<<30)
	for _, c := range []struct{ n, repeats int }{{2048, 1}, {2048 * 4, 4}, {65536, 16}} {
		b.Run(fmt.Sprintf("%dof%d", c.n/c.repeats, c.n), func(b *testing.B) {
			rng := rand.New(rand.NewPCG(1, 1))
			list, unique, at := make([]uint32, c.n), make([]uint32, c.n), make([]uint32, c.n)
			for i := range list {
				list[i] = rng.Uint32N(1<<30/656) / uint32(c.repeats)
				if i >= c.n/c.repeats {
					list[i] = list[rng.IntN(c.n/c.repeats)]
				}
			}
			u, err := NewUnique(c.n)
			if err != nil {
				b.Fatal(err)
			}
			compact := alloc(b, c.n*656)
			known := make(map[uint32]uint32, c.n)
			ways := []func(){
				func() { _, _ = u.U32(list, unique, at) },
				func() {
					clear(known)
					for i, index := range list {
						place, there := known[index]
						if !there {
							place = uint32(len(known))
							known[index] = place
						}
						at[i] = place
					}
				},
				func() { _, _ = Gather(compact, pool, 656, Index{U32: list}) },
			}
			times := make([][]float64, len(ways))
			for range b.N {
				for i, way := range ways {
					begin := time.Now()
					way()
					times[i] = append(times[i], float64(time.Since(begin))/float64(c.n))
				}
			}
			for i, unit := range []string{"ns/index", "map-ns/index", "gather-ns/entry"} {
				slices.Sort(times[i])
				b.ReportMetric(times[i][len(times[i])/2], unit)
			}
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// obvious is what every Move must come to.
func obvious(m *Move) (Tally, error) {
	var t Tally
	for i := range m.Count {
		d, s := plainIndex(&m.Dst, i), plainIndex(&m.Src, i)
		switch {
		case d < 0 || s < 0:
			t.Skipped++
		case fits(m, d, s):
			t.Moved++
			for _, p := range m.Parts {
				to, from := p.strides()
				copy(p.Dst[uint64(d)*to:][:p.Entry], p.Src[uint64(s)*from:])
			}
		default:
			if t.Bad++; t.Bad == 1 {
				t.FirstBad = uint64(i)
			}
		}
	}
	if t.Bad > 0 {
		return t, driver.ErrBounds
	}
	return t, nil
}

func (p *Part) strides() (dst, src uint64) {
	dst, src = p.DstStride, p.SrcStride
	if dst == 0 {
		dst = p.Entry
	}
	if src == 0 {
		src = p.Entry
	}
	return dst, src
}

func plainIndex(x *Index, i int) int64 {
	switch {
	case x.U64 != nil:
		return int64(x.U64[i])
	case x.U32 != nil && x.U32[i] == Skip32:
		return -1
	case x.U32 != nil:
		return int64(x.U32[i])
	}
	return int64(i)
}

func fits(m *Move, d, s int64) bool {
	for _, p := range m.Parts {
		to, from := p.strides()
		if d > int64(len(p.Dst)) || uint64(d)*to+p.Entry > uint64(len(p.Dst)) {
			return false
		}
		if s > int64(len(p.Src)) || uint64(s)*from+p.Entry > uint64(len(p.Src)) {
			return false
		}
	}
	return true
}

func random(rng *rand.Rand, n int) []byte {
	b := make([]byte, n+8)
	for i := 0; i < n; i += 8 {
		binary.LittleEndian.PutUint64(b[i:], rng.Uint64())
	}
	return b[:n]
}

// list draws n indices: of 32 bits, of 64, or none; some skip and some are bad.
func list(rng *rand.Rand, kind, n, places int) Index {
	if kind == 0 {
		return Index{}
	}
	var x Index
	order := rng.Perm(max(n, places))
	for i := range n {
		v := uint64(order[i])
		switch rng.IntN(12) {
		case 0:
			v = Skip64
		case 1:
			v = uint64(places) + rng.Uint64N(1<<20)
		}
		x.U32 = append(x.U32, uint32(v))
		x.U64 = append(x.U64, v)
	}
	if kind == 1 {
		x.U64 = nil
	} else {
		x.U32 = nil
	}
	return x
}

// draw makes a Move of n entries; pad lies between entries and at both ends of each memory.
func draw(rng *rand.Rand, sizes []int, pad, n, dstKind, srcKind int) *Move {
	places := n + 3
	m := &Move{Count: n, Dst: list(rng, dstKind, n, places), Src: list(rng, srcKind, n, places)}
	for _, size := range sizes {
		stride := size + pad
		m.Parts = append(m.Parts, Part{
			Dst:   random(rng, places*stride+32)[16 : 16+places*stride],
			Src:   random(rng, places*stride+32)[16 : 16+places*stride],
			Entry: uint64(size), DstStride: uint64(stride), SrcStride: uint64(stride)})
	}
	return m
}

// compare runs a Move, and the obvious way, and compares all of the destination.
func compare(t *testing.T, m *Move) {
	t.Helper()
	want := *m
	want.Parts = nil
	for _, p := range m.Parts {
		p.Dst = bytes.Clone(p.Dst)
		want.Parts = append(want.Parts, p)
	}
	wantTally, wantErr := obvious(&want)
	got, err := Run(m)
	if got != wantTally || !errors.Is(err, wantErr) {
		t.Fatalf("%+v, %v, want %+v, %v", got, err, wantTally, wantErr)
	}
	for k := range m.Parts {
		whole := m.Parts[k].Dst
		if !bytes.Equal(whole, want.Parts[k].Dst) {
			t.Fatalf("part %d of %d entries of %d bytes differs from the obvious way", k, m.Count,
				m.Parts[k].Entry)
		}
	}
}

func TestRunEqualsTheObviousWay(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, sizes := range [][]int{{4}, {12}, {16}, {132}, {576}, {584}, {656}, {1152}, {5000},
		{656, 132}, {132, 656}} {
		for _, pad := range []int{0, 4, 112} {
			for _, n := range []int{0, 1, 9, 300} {
				for kinds := range 9 {
					compare(t, draw(rng, sizes, pad, n, kinds/3, kinds%3))
				}
			}
		}
	}
}

// TestScatterPastTheCaches covers what is written with streaming stores: guard bytes lie
// before and behind each entry.
func TestScatterPastTheCaches(t *testing.T) {
	const size = 129 << 20
	mem := make([]byte, size)
	rng := rand.New(rand.NewPCG(3, 4))
	for k, entry := range []int{4, 60, 64, 132, 656, 1152} {
		mem := mem[k:] // at any address
		stride := uint64(entry + 20)
		src := random(rng, 100*entry)
		to := make([]uint32, 100)
		for i := range to {
			to[i] = uint32(rng.Uint64N(size/stride-1)/100*100) + uint32(i)
		}
		m := &Move{Count: 100, Dst: Index{U32: to},
			Parts: []Part{{Dst: mem, Src: src, Entry: uint64(entry), DstStride: stride}}}
		if got, err := Run(m); err != nil || got.Moved != 100 {
			t.Fatalf("%+v, %v", got, err)
		}
		for i, place := range to {
			at := uint64(place) * stride
			if !bytes.Equal(mem[at:at+uint64(entry)], src[i*entry:][:entry]) {
				t.Fatalf("entry %d of %d bytes differs", i, entry)
			}
			if !bytes.Equal(mem[at+uint64(entry):at+stride], make([]byte, 20)) {
				t.Fatalf("entry %d of %d bytes: written behind its end", i, entry)
			}
			clear(mem[at : at+uint64(entry)])
		}
	}
	for i := range mem {
		if mem[i] != 0 {
			t.Fatalf("byte %d belongs to no entry and was written", i)
		}
	}
}

func TestBadIndicesAreCounted(t *testing.T) {
	for name, bad := range map[string]uint64{"the next": 4, "far": 1 << 40,
		"wraps": math.MaxUint64 / 4, "almost a skip": math.MaxUint64 - 1} {
		guard := bytes.Repeat([]byte{0xA5}, 4*64+128)
		m := &Move{Count: 5, Dst: Index{U64: []uint64{0, 1, bad, 2, bad}},
			Parts: []Part{{Dst: guard[64 : 64+4*64], Src: make([]byte, 5*64), Entry: 64}}}
		got, err := Run(m)
		if err != driver.ErrBounds || got != (Tally{Moved: 3, Bad: 2, FirstBad: 2}) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		if n := bytes.Count(guard, []byte{0}); n != 3*64 {
			t.Errorf("%s: %d bytes written, want three entries", name, n)
		}
	}
}

func TestLayoutErrors(t *testing.T) {
	cases := []struct {
		name string
		m    Move
		want string
	}{
		{"no part", Move{}, "0 parts: want 1 to 2"},
		{"three parts", Move{Parts: make([]Part, 3)}, "3 parts"},
		{"no entry", Move{Parts: []Part{{}}}, "part 0: entry of 0 bytes: want a multiple of 4"},
		{"odd entry", Move{Parts: []Part{{Entry: 16}, {Entry: 130}}}, "part 1: entry of 130 bytes"},
		{"huge entry", Move{Parts: []Part{{Entry: EntryMax + 4}}}, "entry of"},
		{"short stride", Move{Parts: []Part{{Entry: 16, DstStride: 12}}},
			"stride of 12 bytes: want a multiple of 4, at least the entry's 16"},
		{"odd stride", Move{Parts: []Part{{Entry: 16, SrcStride: 17}}}, "stride of 17 bytes"},
		{"negative count", Move{Parts: []Part{{Entry: 16}}, Count: -1}, "-1 entries"},
		{"short list", Move{Parts: []Part{{Entry: 16}}, Count: 2,
			Src: Index{U32: make([]uint32, 1)}}, "1 indices of the source: want one for each of 2"},
		{"empty list", Move{Parts: []Part{{Entry: 16}}, Count: 1, Dst: Index{U64: []uint64{}}},
			"0 indices of the destination"},
		{"two lists", Move{Parts: []Part{{Entry: 16}}, Dst: Index{U32: []uint32{},
			U64: []uint64{}}}, "two lists of the destination"},
	}
	for _, c := range cases {
		for _, run := range []func(*Move) (Tally, error){Run,
			func(m *Move) (Tally, error) {
				return Tally{}, m.Check()
			}} {
			got, err := run(&c.m)
			var layout *LayoutError
			if !errors.As(err, &layout) || !errors.Is(err, driver.ErrBounds) ||
				!strings.Contains(err.Error(), c.want) || got != (Tally{}) {
				t.Errorf("%s: %+v, %v, want %q", c.name, got, err, c.want)
			}
		}
	}
}

// TestOddAddress: the twin takes what kernels do not.
func TestOddAddress(t *testing.T) {
	mem := make([]byte, 1<<10+1)
	for i := range mem {
		mem[i] = byte(i)
	}
	m := &Move{Count: 1, Parts: []Part{{Entry: 256, Dst: mem[:256], Src: mem[513:]}}}
	var layout *LayoutError
	if err := m.Check(); !errors.As(err, &layout) ||
		!strings.Contains(err.Error(), "odd address: want a multiple of 4") {
		t.Errorf("%v", err)
	}
	compare(t, m)
}

func TestWidth(t *testing.T) {
	for entry, want := range map[uint64]uint32{656: 16, 576: 16, 584: 8, 1152: 16, 132: 4,
		640: 16} {
		m := Move{Parts: []Part{{Entry: entry}}}
		var a args
		if err := m.fill(&a); err != nil || a.part[0].width != want {
			t.Errorf("%d bytes: %v, steps of %d, want %d", entry, err, a.part[0].width, want)
		}
	}
}

func TestRunDoesNotAllocate(t *testing.T) {
	m := draw(rand.New(rand.NewPCG(5, 6)), []int{656, 132}, 0, 1000, 0, 1)
	if n := testkit.AllocsPerRun(50, func() {
		_, _ = Run(m)
	}); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}

// FuzzRun: any list of indices, over memories of any size.
func FuzzRun(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0, 255, 255, 255, 255, 9, 0, 0, 0}, uint16(700), uint8(4), uint8(0), true)
	f.Add([]byte{}, uint16(0), uint8(1), uint8(3), false)
	f.Fuzz(func(t *testing.T, indices []byte, bytes uint16, entry, pad uint8, scatter bool) {
		n := len(indices) / 4
		x := make([]uint32, n)
		for i := range x {
			x[i] = uint32(indices[4*i]) | uint32(indices[4*i+1])<<8 | uint32(indices[4*i+2])<<16 |
				uint32(indices[4*i+3])<<24
		}
		rng := rand.New(rand.NewPCG(uint64(bytes), 1))
		p := Part{Dst: random(rng, int(bytes)), Src: random(rng, int(bytes)/2),
			Entry: uint64(entry) * 4}
		p.DstStride, p.SrcStride = p.Entry+uint64(pad)*4, p.Entry
		m := &Move{Parts: []Part{p}, Count: n, Src: Index{U32: x}}
		if scatter {
			m.Dst, m.Src = m.Src, Index{}
		}
		if entry == 0 {
			if err := m.Check(); err == nil {
				t.Error("no error for a layout that no kernel takes")
			}
			return
		}
		compare(t, m)
	})
}

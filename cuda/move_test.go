// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// hostMove is a Move whose memories and lists are the test's own.
type hostMove struct {
	Parts    []hostPart
	Count    int
	Dst, Src hostIndex
}

type hostPart struct {
	Dst, Src                    []byte
	Entry, DstStride, SrcStride uint64
}

type hostIndex struct {
	U32 []uint32
	U64 []uint64
}

// obvious does by a loop what Device.Run has a kernel do.
func obvious(m *hostMove) (Tally, error) {
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

func (p *hostPart) strides() (dst, src uint64) {
	dst, src = p.DstStride, p.SrcStride
	if dst == 0 {
		dst = p.Entry
	}
	if src == 0 {
		src = p.Entry
	}
	return dst, src
}

func plainIndex(x *hostIndex, i int) int64 {
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

func fits(m *hostMove, d, s int64) bool {
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
func list(rng *rand.Rand, kind, n, places int) hostIndex {
	if kind == 0 {
		return hostIndex{}
	}
	var x hostIndex
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
func draw(rng *rand.Rand, sizes []int, pad, n, dstKind, srcKind int) *hostMove {
	places := n + 3
	m := &hostMove{Count: n, Dst: list(rng, dstKind, n, places), Src: list(rng, srcKind, n, places)}
	for _, size := range sizes {
		stride := size + pad
		m.Parts = append(m.Parts, hostPart{
			Dst:   random(rng, places*stride+32)[16 : 16+places*stride],
			Src:   random(rng, places*stride+32)[16 : 16+places*stride],
			Entry: uint64(size), DstStride: uint64(stride), SrcStride: uint64(stride)})
	}
	return m
}

func TestLayoutErrors(t *testing.T) {
	at := func(at, stride uint64) side { return side{at, 1 << 20, stride} }
	for name, c := range map[string]struct {
		parts, count int
		entry        uint64
		dst, src     side
		want         string
	}{
		"no part":        {0, 1, 16, side{}, side{}, "0 parts: want 1 to 2"},
		"three parts":    {3, 1, 16, side{}, side{}, "3 parts"},
		"negative count": {1, -1, 16, side{}, side{}, "-1 entries"},
		"no entry":       {1, 1, 0, side{}, side{}, "entry of 0 bytes: want a multiple of 4"},
		"odd entry":      {1, 1, 130, side{}, side{}, "entry of 130 bytes"},
		"huge entry":     {1, 1, EntryMax + 4, side{}, side{}, "entry of"},
		"short stride": {1, 1, 16, at(0, 12), side{},
			"stride of 12 bytes: want a multiple of 4, at least the entry's 16"},
		"odd stride":  {1, 1, 16, side{}, at(0, 17), "stride of 17 bytes"},
		"odd address": {1, 1, 16, at(1, 0), side{}, "odd address: want a multiple of 4"},
	} {
		var a args
		err := a.begin(c.parts, c.count)
		if err == nil {
			err = a.fill(0, c.entry, c.dst, c.src)
		}
		if err == nil {
			err = a.aligned()
		}
		var layout *LayoutError
		if !errors.As(err, &layout) || !errors.Is(err, driver.ErrBounds) ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	a := args{count: 2}
	require.ErrorContains(t, a.covers(1, "source"), "1 indices of the source: want one")
	require.NoError(t, a.covers(2, "source"))
}

func TestWidth(t *testing.T) {
	for entry, want := range map[uint64]uint32{656: 16, 576: 16, 584: 8, 1152: 16, 132: 4,
		640: 16} {
		require.Equal(t, want, entries(1, entry).part[0].width, "%d bytes", entry)
	}
}

// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"math"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestDescLayout holds Desc to what crosses into C: 32 bytes without a pointer.
func TestDescLayout(t *testing.T) {
	d := reflect.TypeFor[Desc]()
	require.EqualValues(t, 32, d.Size(), "Desc has bytes")
	for i := range d.NumField() {
		switch f := d.Field(i); f.Type.Kind() {
		case reflect.Uint32, reflect.Uint64:
		default:
			t.Errorf("field %s is a %v", f.Name, f.Type)
		}
	}
}

func TestDescCheck(t *testing.T) {
	const max = math.MaxUint64
	for _, c := range []struct {
		d             Desc
		local, remote uint64
		ok            bool
	}{
		{Desc{Len: 10}, 10, 10, true},
		{Desc{Len: 0}, 10, 10, false},
		{Desc{Local: 1, Len: 10}, 10, 11, false},
		{Desc{Remote: 1, Len: 10}, 11, 10, false},
		{Desc{Local: max, Len: 2}, 10, 10, false},
		{Desc{Remote: 2, Len: max - 1}, max, 10, false},
		{Desc{Len: max}, max, max, true},
	} {
		if err := c.d.Check(c.local, c.remote); (err == nil) != c.ok ||
			(err != nil && !errors.Is(err, ErrBounds)) {
			t.Errorf("%+v within %d and %d: %v", c.d, c.local, c.remote, err)
		}
	}
}

func TestPatternCheck(t *testing.T) {
	const max = math.MaxUint64
	base := Pattern{Count: 3, Run: 10, Local: Side{Stride: 10},
		Remote: Side{Stride: 16, List: []uint32{5, 0, 5}}}
	for name, c := range map[string]struct {
		change        func(*Pattern)
		local, remote uint64
		ok            bool
	}{
		"fits":             {func(*Pattern) {}, 30, 90, true},
		"local short":      {func(*Pattern) {}, 29, 90, false},
		"remote short":     {func(*Pattern) {}, 30, 89, false},
		"no entries":       {func(p *Pattern) { p.Count = 0 }, 30, 90, false},
		"negative":         {func(p *Pattern) { p.Count = -1 }, 30, 90, false},
		"empty runs":       {func(p *Pattern) { p.Run = 0 }, 30, 90, false},
		"list too short":   {func(p *Pattern) { p.Count = 4 }, 40, 90, false},
		"stride too small": {func(p *Pattern) { p.Local.Stride = 9 }, 30, 90, false},
		"units of a list":  {func(p *Pattern) { p.Remote.Stride = 2 }, 30, 20, true},
		"units are past":   {func(p *Pattern) { p.Remote.Stride = 2 }, 30, 19, false},
		"one entry":        {func(p *Pattern) { p.Local.Stride = 0 }, 10, 90, true},
		"base past":        {func(p *Pattern) { p.Local.Base = 31 }, 30, 90, false},
		"base overflows":   {func(p *Pattern) { p.Remote.Base = max - 5 }, 30, 90, false},
		"stride overflows": {func(p *Pattern) { p.Remote.Stride = max / 2 }, 30, max, false},
		"index overflows": {func(p *Pattern) {
			p.Remote.List = []uint32{math.MaxUint32, 0, 0}
			p.Remote.Stride = 1 << 40
		}, 30, 90, false},
		"a loop fits":       {func(p *Pattern) { p.Loops = []Loop{{2, 5, 6}} }, 35, 96, true},
		"a loop is past":    {func(p *Pattern) { p.Loops = []Loop{{2, 6, 6}} }, 35, 96, false},
		"a loop of nothing": {func(p *Pattern) { p.Loops = []Loop{{0, 1, 1}} }, 99, 99, false},
		"loops overflow": {func(p *Pattern) {
			p.Loops = []Loop{{3, max / 2, 1}}
		}, max, max, false},
		"too many runs": {func(p *Pattern) {
			p.Loops = []Loop{{1 << 31, 0, 0}, {1 << 31, 0, 0}}
		}, max, max, false},
		"too many loops": {func(p *Pattern) {
			p.Loops = make([]Loop, LoopsMax+1)
		}, max, max, false},
		"slots fit": {func(p *Pattern) {
			p.Local = Side{Stride: 20, Step: 10, Per: 2, First: 1}
		}, 40, 90, true},
		"slots are past": {func(p *Pattern) {
			p.Local = Side{Stride: 20, Step: 10, Per: 2, First: 1}
		}, 39, 90, false},
		"slots are listed": {func(p *Pattern) {
			p.Local = Side{Stride: 20, Step: 10, Per: 2, First: 1, List: []uint32{1, 0}}
		}, 40, 90, true},
		"first past its slot": {func(p *Pattern) {
			p.Local = Side{Stride: 20, Step: 10, Per: 2, First: 2}
		}, 99, 90, false},
		"first without slots": {func(p *Pattern) { p.Local.First = 1 }, 99, 90, false},
		"step overflows": {func(p *Pattern) {
			p.Local = Side{Stride: 20, Step: max, Per: 3}
		}, max, 90, false},
	} {
		p := base
		c.change(&p)
		err := p.Check(c.local, c.remote)
		if (err == nil) != c.ok || (err != nil && !errors.Is(err, ErrBounds)) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if d := base.Desc(2); d.Local != 20 || d.Remote != 80 || d.Len != 10 || base.Bytes() != 30 {
		t.Errorf("entry 2 is %+v of %d bytes", d, base.Bytes())
	}
}

// TestPatternDescs holds the runs of a nest against loops written out.
func TestPatternDescs(t *testing.T) {
	p := Pattern{Run: 4, Count: 5, Loops: []Loop{{2, 100, 1000}, {3, 10, 20}},
		Local:  Side{Base: 7, Stride: 500, Step: 200, Per: 2, First: 1, List: []uint32{3, 1, 2}},
		Remote: Side{Stride: 5000}}
	locals := []uint64{7 + 3*500 + 200, 7 + 500, 7 + 500 + 200, 7 + 2*500, 7 + 2*500 + 200}
	if err := p.Check(1<<20, 1<<20); err != nil || p.Plain() || p.Runs() != 6 || p.Bytes() != 120 {
		t.Fatalf("%v, %d runs, %d bytes", err, p.Runs(), p.Bytes())
	}
	for i := range p.Count {
		var want []Desc
		for a := range uint64(2) {
			for b := range uint64(3) {
				want = append(want, Desc{Local: locals[i] + 100*a + 10*b, Remote: uint64(i)*5000 +
					1000*a + 20*b, Len: 4})
			}
		}
		if got := p.AppendDescs(nil, i); !slices.Equal(got, want) {
			t.Errorf("entry %d is %+v, want %+v", i, got, want)
		}
	}
}

// FuzzPatternCheck: what is accepted has every run within both sizes, computed
// without the shortcuts.
func FuzzPatternCheck(f *testing.F) {
	f.Add(uint64(656), uint64(0), uint64(656), uint32(7), uint64(10000), uint32(1), uint64(0),
		uint32(1), uint64(0), uint32(0))
	f.Add(uint64(1), uint64(math.MaxUint64), uint64(1), uint32(1), uint64(math.MaxUint64),
		uint32(2), uint64(5), uint32(3), uint64(9), uint32(2))
	f.Fuzz(func(t *testing.T, run, base, stride uint64, slot uint32, size uint64, n uint32,
		loop uint64, per uint32, step uint64, first uint32) {
		p := Pattern{Count: 1, Run: run, Loops: []Loop{{n, loop, 0}},
			Local: Side{Base: base, Stride: stride, Step: step, First: first, Per: per,
				List: []uint32{slot}}}
		if p.Check(size, run) != nil {
			return
		}
		at := float64(base) + float64(slot)*float64(stride) + float64(first)*float64(step)
		hi := at + float64(n-1)*float64(loop) + float64(run)
		last := p.Local.At(0) + uint64(n-1)*loop
		if hi > float64(size)*1.0000001 || last > size || run > size-last {
			t.Fatalf("%+v accepted within %d", p, size)
		}
	})
}

func TestBatchCheck(t *testing.T) {
	const all = CanPattern | CanNotify | CanDurable
	descs, plain := []Desc{{Len: 1}}, &Pattern{Run: 1, Count: 1}
	nest := &Pattern{Run: 1, Count: 1, Loops: []Loop{{N: 2}}}
	for name, c := range map[string]struct {
		b    Batch
		need Can // the bits without which it is refused
		want error
	}{
		"descriptors":  {b: Batch{Op: Read, Descs: descs}},
		"pattern":      {b: Batch{Op: Read, Pattern: plain}, need: CanPattern},
		"nest":         {b: Batch{Op: Write, Pattern: nest}, need: CanPattern},
		"notification": {b: Batch{Op: Write, Tail: NotifyTail}, need: CanNotify},
		"durable":      {b: Batch{Op: Write, Durable: true, Descs: descs}, need: CanDurable},
		"no operation": {b: Batch{Descs: descs}, want: ErrNotSupported},
		"read with a tail": {b: Batch{Op: Read, Tail: NotifyTail, Descs: descs},
			want: ErrNotSupported},
		"durable read": {b: Batch{Op: Read, Durable: true, Descs: descs},
			want: ErrNotSupported},
		"durable with a tail": {b: Batch{Op: Write, Durable: true, Tail: NotifyTail},
			want: ErrNotSupported},
		"both": {b: Batch{Op: Read, Descs: descs, Pattern: plain},
			want: ErrNotSupported},
		"unknown tail": {b: Batch{Op: Write, Tail: 9}, want: ErrNotSupported},
		"nothing":      {b: Batch{Op: Write}, want: ErrBounds},
	} {
		require.ErrorIs(t, c.b.Check(all), c.want, "%s", name)
		if err := c.b.Check(all &^ c.need); c.need != 0 && !errors.Is(err, ErrNotSupported) {
			t.Errorf("%s without its bit: %v", name, err)
		}
	}
	b := Batch{Op: Write, Pattern: nest}
	require.Zero(t, testing.AllocsPerRun(100, func() { _ = b.Check(CanPattern) }), "allocations")
}

type pages struct{ Shared }

func TestSegment(t *testing.T) {
	s := Segment{Kind: DRAM, Mem: make([]byte, 100), Len: 100, Shared: pages{}, SharedOff: 7}
	require.NoError(t, s.Check())
	part, err := s.Slice(10, 20, [16]byte{1})
	if err != nil || part.Len != 20 || len(part.Mem) != 20 || cap(part.Mem) != 20 ||
		part.SharedOff != 17 || part.Secret[0] != 1 {
		t.Errorf("a slice is %+v, %v", part, err)
	}
	if hbm, _ := (Segment{Kind: HBM, Addr: 1000, Len: 100}).Slice(10, 20,
		[16]byte{}); hbm.Addr != 1010 {
		t.Errorf("device address %d", hbm.Addr)
	}
	whole := Segment{Kind: HBM, Addr: 0x10000, Len: 100, DMABuf: &DMABuf{FD: 3, Offset: 4096}}
	require.NoError(t, whole.Check())
	if hbm, _ := whole.Slice(10, 20, [16]byte{}); *hbm.DMABuf != (DMABuf{3, 4106}) ||
		whole.DMABuf.Offset != 4096 || hbm.Check() != nil {
		t.Errorf("the dma-buf of a slice is %+v, of the whole %+v", hbm.DMABuf, whole.DMABuf)
	}
	if file, _ := (Segment{Kind: File, FileOff: 1000, Len: 100}).Slice(10, 20,
		[16]byte{}); file.FileOff != 1010 {
		t.Errorf("file offset %d", file.FileOff)
	}
	for _, bad := range [][2]uint64{{0, 0}, {0, 101}, {100, 1}, {math.MaxUint64, 2}} {
		if _, err := s.Slice(bad[0], bad[1], [16]byte{}); !errors.Is(err, ErrBounds) {
			t.Errorf("slice %v: %v", bad, err)
		}
	}
	for name, bad := range map[string]Segment{
		"empty": {}, "length": {Kind: DRAM, Mem: make([]byte, 5), Len: 6}, "no address": {Kind: HBM,
			Len: 1},
		"no file": {Kind: File, FD: -1, Len: 1}, "device address too high": {Kind: HBM,
			Addr: math.MaxUint64, Len: 2},
		"dma-buf of dram":  {Kind: DRAM, Mem: make([]byte, 5), Len: 5, DMABuf: &DMABuf{}},
		"dma-buf not open": {Kind: HBM, Addr: 4096, Len: 1, DMABuf: &DMABuf{FD: -1}},
		"dma-buf too long": {Kind: HBM, Addr: 4096, Len: 8192,
			DMABuf: &DMABuf{Offset: math.MaxUint64 - 4095}},
		"dma-buf within a page": {Kind: HBM, Addr: 4096, Len: 1, DMABuf: &DMABuf{Offset: 1}},
	} {
		require.ErrorIs(t, bad.Check(), ErrBounds, "%s", name)
	}
	require.ErrorIs(t, (&Segment{Kind: 9, Len: 1}).Check(), errors.ErrUnsupported,
		"an unknown kind")
}

func TestCaps(t *testing.T) {
	p := Pairs{DRAM: KindsOf(DRAM, File)}
	if !p.Serves(DRAM, File) || p.Serves(File, DRAM) || p.Serves(9, DRAM) ||
		p.Local() != KindsOf(DRAM, File) {
		t.Errorf("pairs %v", p)
	}
	require.Equal(t, "dram,hbm,file", KindsOf(DRAM, HBM, File).String(), "kinds are")
	c := Cost{Setup: time.Microsecond, PerPiece: 10, Rate: 1e9}
	require.EqualValues(t, 3*time.Microsecond, c.Estimate(100, 1000), "estimated")
	if got := (Cost{Rate: 1e-300}).Estimate(1, math.MaxUint64); got <= 0 {
		t.Errorf("estimated %v for ever", got)
	}
}

func TestErrors(t *testing.T) {
	unavailable := &UnavailableError{Backend: "ucx", Reason: "no libucp.so.0",
		Fix: "apt-get install libucx0"}
	for _, c := range []struct {
		err, is error
		says    string
	}{
		{ErrClosed, os.ErrClosed, "closed"},
		{ErrNotSupported, errors.ErrUnsupported, "not supported"},
		{ErrTimeout, os.ErrDeadlineExceeded, "deadline"},
		{unavailable, ErrUnavailable, "to mend: apt-get install libucx0"},
		{&PieceError{Piece: 3, Err: ErrRevoked}, ErrRevoked, "piece 3"},
	} {
		if !errors.Is(c.err, c.is) || !strings.Contains(c.err.Error(), c.says) {
			t.Errorf("%q is %v: %v", c.err, c.is, errors.Is(c.err, c.is))
		}
	}
}

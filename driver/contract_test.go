// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"math"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"
)

// TestDescLayout holds Desc to what crosses into C: 32 bytes without a pointer.
func TestDescLayout(t *testing.T) {
	d := reflect.TypeFor[Desc]()
	if d.Size() != 32 {
		t.Errorf("Desc has %d bytes", d.Size())
	}
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
		if err := c.d.Check(c.local, c.remote); (err == nil) != c.ok || (err != nil && !errors.Is(err, ErrBounds)) {
			t.Errorf("%+v within %d and %d: %v", c.d, c.local, c.remote, err)
		}
	}
}

func TestPagesCheck(t *testing.T) {
	const max = math.MaxUint64
	base := Pages{Count: 3, EntryLen: 10, LocalStride: 10, RemoteStride: 16, Remote: []uint32{5, 0, 5}}
	for name, c := range map[string]struct {
		change        func(*Pages)
		local, remote uint64
		ok            bool
	}{
		"fits":             {func(*Pages) {}, 30, 90, true},
		"local short":      {func(*Pages) {}, 29, 90, false},
		"remote short":     {func(*Pages) {}, 30, 89, false},
		"no entries":       {func(p *Pages) { p.Count = 0 }, 30, 90, false},
		"negative":         {func(p *Pages) { p.Count = -1 }, 30, 90, false},
		"empty entries":    {func(p *Pages) { p.EntryLen = 0 }, 30, 90, false},
		"list too short":   {func(p *Pages) { p.Count = 4 }, 40, 90, false},
		"stride too small": {func(p *Pages) { p.LocalStride = 9 }, 30, 90, false},
		"one entry":        {func(p *Pages) { p.LocalStride = 0 }, 10, 90, true},
		"base past":        {func(p *Pages) { p.LocalBase = 31 }, 30, 90, false},
		"base overflows":   {func(p *Pages) { p.RemoteBase = max - 5 }, 30, 90, false},
		"stride overflows": {func(p *Pages) { p.RemoteStride = max / 2 }, 30, max, false},
		"index overflows":  {func(p *Pages) { p.Remote = []uint32{math.MaxUint32, 0, 0}; p.RemoteStride = 1 << 40 }, 30, 90, false},
	} {
		p := base
		c.change(&p)
		if err := p.Check(c.local, c.remote); (err == nil) != c.ok || (err != nil && !errors.Is(err, ErrBounds)) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if d := base.Desc(2); d.Local != 20 || d.Remote != 80 || d.Len != 10 || base.Bytes() != 30 {
		t.Errorf("entry 2 is %+v of %d bytes", d, base.Bytes())
	}
}

// FuzzPagesCheck: what is accepted has every entry within both sizes, computed
// without the shortcuts.
func FuzzPagesCheck(f *testing.F) {
	f.Add(uint64(656), uint64(0), uint64(656), uint32(7), uint64(10000))
	f.Add(uint64(1), uint64(math.MaxUint64), uint64(1), uint32(1), uint64(math.MaxUint64))
	f.Fuzz(func(t *testing.T, entry, base, stride uint64, index uint32, size uint64) {
		p := Pages{Count: 1, EntryLen: entry, LocalBase: base, LocalStride: stride, Local: []uint32{index}, RemoteStride: entry}
		if p.Check(size, entry) != nil {
			return
		}
		hi := float64(base) + float64(index)*float64(stride) + float64(entry)
		if hi > float64(size)*1.0000001 || p.LocalAt(0) > size || entry > size-p.LocalAt(0) {
			t.Fatalf("%+v accepted within %d", p, size)
		}
	})
}

type pages struct{ Shared }

func TestSegment(t *testing.T) {
	s := Segment{Kind: DRAM, Mem: make([]byte, 100), Len: 100, Shared: pages{}, SharedOff: 7}
	if err := s.Check(); err != nil {
		t.Error(err)
	}
	part, err := s.Slice(10, 20, [16]byte{1})
	if err != nil || part.Len != 20 || len(part.Mem) != 20 || cap(part.Mem) != 20 || part.SharedOff != 17 || part.Secret[0] != 1 {
		t.Errorf("a slice is %+v, %v", part, err)
	}
	if hbm, _ := (Segment{Kind: HBM, Addr: 1000, Len: 100}).Slice(10, 20, [16]byte{}); hbm.Addr != 1010 {
		t.Errorf("device address %d", hbm.Addr)
	}
	whole := Segment{Kind: HBM, Addr: 0x10000, Len: 100, DMABuf: &DMABuf{FD: 3, Offset: 4096}}
	if err := whole.Check(); err != nil {
		t.Error(err)
	}
	if hbm, _ := whole.Slice(10, 20, [16]byte{}); *hbm.DMABuf != (DMABuf{3, 4106}) || whole.DMABuf.Offset != 4096 || hbm.Check() != nil {
		t.Errorf("the dma-buf of a slice is %+v, of the whole %+v", hbm.DMABuf, whole.DMABuf)
	}
	if file, _ := (Segment{Kind: File, FileOff: 1000, Len: 100}).Slice(10, 20, [16]byte{}); file.FileOff != 1010 {
		t.Errorf("file offset %d", file.FileOff)
	}
	for _, bad := range [][2]uint64{{0, 0}, {0, 101}, {100, 1}, {math.MaxUint64, 2}} {
		if _, err := s.Slice(bad[0], bad[1], [16]byte{}); !errors.Is(err, ErrBounds) {
			t.Errorf("slice %v: %v", bad, err)
		}
	}
	for name, bad := range map[string]Segment{
		"empty": {}, "length": {Kind: DRAM, Mem: make([]byte, 5), Len: 6}, "no address": {Kind: HBM, Len: 1},
		"no file": {Kind: File, FD: -1, Len: 1}, "device address too high": {Kind: HBM, Addr: math.MaxUint64, Len: 2},
		"dma-buf of dram":       {Kind: DRAM, Mem: make([]byte, 5), Len: 5, DMABuf: &DMABuf{}},
		"dma-buf not open":      {Kind: HBM, Addr: 4096, Len: 1, DMABuf: &DMABuf{FD: -1}},
		"dma-buf too long":      {Kind: HBM, Addr: 4096, Len: 8192, DMABuf: &DMABuf{Offset: math.MaxUint64 - 4095}},
		"dma-buf within a page": {Kind: HBM, Addr: 4096, Len: 1, DMABuf: &DMABuf{Offset: 1}},
	} {
		if err := bad.Check(); !errors.Is(err, ErrBounds) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := (&Segment{Kind: 9, Len: 1}).Check(); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("an unknown kind: %v", err)
	}
}

func TestCaps(t *testing.T) {
	p := Pairs{DRAM: KindsOf(DRAM, File)}
	if !p.Serves(DRAM, File) || p.Serves(File, DRAM) || p.Serves(9, DRAM) || p.Local() != KindsOf(DRAM, File) {
		t.Errorf("pairs %v", p)
	}
	if got := KindsOf(DRAM, HBM, File).String(); got != "dram,hbm,file" {
		t.Errorf("kinds are %q", got)
	}
	c := Cost{Setup: time.Microsecond, PerPiece: 10, Rate: 1e9}
	if got := c.Estimate(100, 1000); got != 3*time.Microsecond {
		t.Errorf("estimated %v", got)
	}
	if got := (Cost{Rate: 1e-300}).Estimate(1, math.MaxUint64); got <= 0 {
		t.Errorf("estimated %v for ever", got)
	}
}

func TestErrors(t *testing.T) {
	unavailable := &UnavailableError{Backend: "ucx", Reason: "no libucp.so.0", Fix: "apt-get install libucx0"}
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

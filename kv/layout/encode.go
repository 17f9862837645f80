// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"bytes"
	"encoding/binary"
	"fmt"
)

// The encoding of a Side, all numbers little-endian:
//
//	"SLKV", version u16, rank u32, dp u32, names u16, regions u16, groups u16, views u32
//	names: length u8, bytes; the model's first, the others by first use
//	regions: name u16, bytes u64
//	groups: blocks u32, state u8, window u32, ring u32, shards u32, shard u32, interleave u32
//	views: layer, part, dtype, region, group u16, cell, units, first, count, tokens u32,
//	       base, block, unit, token u64
//
// A side has one encoding only, and bytes that differ from it are refused.
const (
	sideMagic  = "SLKV"
	headBytes  = 4 + 2 + 4 + 4 + 2 + 2 + 2 + 4
	areaBytes  = 2 + 8
	groupBytes = 4 + 1 + 5*4
	viewBytes  = 5*2 + 5*4 + 4*8
)

// Marshal returns the bytes that ParseSide takes: about 70 for each view. The error is that
// of Check.
func (s *Side) Marshal() ([]byte, error) {
	if err := s.Check(); err != nil {
		return nil, err
	}
	var names []string
	number := make(map[string]uint16)
	name := func(text string) uint16 {
		n, ok := number[text]
		if !ok {
			n = uint16(len(names))
			number[text] = n
			names = append(names, text)
		}
		return n
	}
	u16, u32, u64 := binary.LittleEndian.AppendUint16, binary.LittleEndian.AppendUint32,
		binary.LittleEndian.AppendUint64
	name(s.Model)
	body := make([]byte, 0, len(s.Regions)*areaBytes+len(s.Groups)*groupBytes+
		len(s.Views)*viewBytes)
	for _, a := range s.Regions {
		body = u64(u16(body, name(a.Name)), a.Bytes)
	}
	for _, g := range s.Groups {
		state := byte(0)
		if g.State {
			state = 1
		}
		body = append(u32(body, g.Blocks), state)
		for _, n := range []int{g.Window, g.Ring, g.Shards, g.Shard, g.Interleave} {
			body = u32(body, uint32(n))
		}
	}
	for i := range s.Views {
		v := &s.Views[i]
		body = u16(u16(u16(body, uint16(v.Layer)), name(v.Part)), name(v.DType))
		body = u16(u16(body, uint16(v.Region)), uint16(v.Group))
		for _, n := range []int{int(v.Cell), v.Units, v.First, v.Count, v.Tokens} {
			body = u32(body, uint32(n))
		}
		body = u64(u64(u64(u64(body, v.Base), v.Block), v.Unit), v.Token)
	}
	if len(names) > namesMax {
		return nil, fmt.Errorf("side: %d names, want at most %d: %w", len(names), namesMax,
			ErrGeometry)
	}
	b := u16(append(make([]byte, 0, headBytes+len(body)+16*len(names)), sideMagic...), s.Version)
	b = u32(u32(b, uint32(s.Rank)), uint32(s.DP))
	b = u16(u16(u16(b, uint16(len(names))), uint16(len(s.Regions))), uint16(len(s.Groups)))
	b = u32(b, uint32(len(s.Views)))
	for _, text := range names {
		b = append(append(b, byte(len(text))), text...)
	}
	return append(b, body...), nil
}

const namesMax = 1 << 12

// ParseSide reads what Marshal wrote. It allocates no more than a small multiple of the
// length of b, whatever the bytes are, and keeps nothing of b. A side of another version is
// ErrSideVersion; other errors are ErrSideEncoding, or ErrGeometry for a side that Check refuses.
func ParseSide(b []byte) (*Side, error) {
	if len(b) < headBytes || string(b[:4]) != sideMagic {
		return nil, fmt.Errorf("parse side: %d bytes without a head: %w", len(b), ErrSideEncoding)
	}
	r := reader{b: b[4:]}
	s := &Side{Version: r.u16()}
	if s.Version != SideVersion {
		return nil, fmt.Errorf("parse side: version %d, this program takes %d: run the same "+
			"release on both sides: %w", s.Version, SideVersion, ErrSideVersion)
	}
	s.Rank, s.DP = int(r.u32()), int(r.u32())
	names, regions, groups, views := int(r.u16()), int(r.u16()), int(r.u16()), int(r.u32())
	if names < 1 || names > namesMax || regions > RegionsMax || groups > GroupsMax ||
		views > ViewsMax ||
		len(r.b) < 2*names+regions*areaBytes+groups*groupBytes+views*viewBytes {
		return nil, fmt.Errorf("parse side: %d names, %d regions, %d groups, %d views in %d "+
			"bytes: %w", names, regions, groups, views, len(b), ErrSideEncoding)
	}
	r.names = make([]string, names)
	for i := range r.names {
		r.names[i] = r.text()
	}
	if len(r.b) != regions*areaBytes+groups*groupBytes+views*viewBytes {
		return nil, fmt.Errorf("parse side: %d bytes behind the names: %w", len(r.b),
			ErrSideEncoding)
	}
	s.Model = r.names[0]
	r.rest(s, regions, groups, views)
	if r.bad {
		return nil, fmt.Errorf("parse side: a name past the %d there are: %w", names,
			ErrSideEncoding)
	}
	again, err := s.Marshal()
	if err != nil {
		return nil, fmt.Errorf("parse side: %w", err)
	}
	if !bytes.Equal(again, b) {
		return nil, fmt.Errorf("parse side: not the canonical encoding: %w", ErrSideEncoding)
	}
	return s, nil
}

// reader takes numbers off bytes whose length has been compared already; names alone can end
// early.
type reader struct {
	b     []byte
	names []string
	bad   bool
}

func (r *reader) take(n int) []byte {
	if len(r.b) < n {
		r.bad = true
		return make([]byte, 8)
	}
	head := r.b[:n]
	r.b = r.b[n:]
	return head
}

func (r *reader) u16() uint16 { return binary.LittleEndian.Uint16(r.take(2)) }
func (r *reader) u32() uint32 { return binary.LittleEndian.Uint32(r.take(4)) }
func (r *reader) u64() uint64 { return binary.LittleEndian.Uint64(r.take(8)) }

func (r *reader) text() string {
	n := int(r.take(1)[0])
	if n > len(r.b) {
		r.bad = true
		return ""
	}
	return string(r.take(n))
}

func (r *reader) name() string {
	n := int(r.u16())
	if n >= len(r.names) {
		r.bad = true
		return ""
	}
	return r.names[n]
}

func (r *reader) rest(s *Side, regions, groups, views int) {
	for range regions {
		s.Regions = append(s.Regions, Area{r.name(), r.u64()})
	}
	for range groups {
		g := Group{Blocks: r.u32(), State: r.take(1)[0] == 1}
		for _, n := range []*int{&g.Window, &g.Ring, &g.Shards, &g.Shard, &g.Interleave} {
			*n = int(r.u32())
		}
		s.Groups = append(s.Groups, g)
	}
	s.Views = make([]View, views)
	for i := range s.Views {
		v := &s.Views[i]
		v.Layer, v.Part, v.DType = int(r.u16()), r.name(), r.name()
		v.Region, v.Group = int(r.u16()), int(r.u16())
		v.Cell = uint64(r.u32())
		for _, n := range []*int{&v.Units, &v.First, &v.Count, &v.Tokens} {
			*n = int(r.u32())
		}
		v.Base, v.Block, v.Unit, v.Token = r.u64(), r.u64(), r.u64(), r.u64()
	}
}

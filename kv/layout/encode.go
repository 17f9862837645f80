// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"bytes"
	"encoding/binary"
	"fmt"
)

// The encoding of a Side, all numbers little-endian:
//
//	sideHead
//	names: length u8, bytes; the model's first, the others by first use
//	regionRecord, groupRecord and viewRecord, as many as the head says
//
// A side has one encoding only, and bytes that differ from it are refused.
const (
	sideMagic = "SLKV"
	namesMax  = 1 << 12
)

type sideHead struct {
	Magic                  [4]byte
	Version                uint16
	Rank, DP               uint32
	Names, Regions, Groups uint16
	Views                  uint32
}

type regionRecord struct {
	Name  uint16
	Bytes uint64
}

type groupRecord struct {
	Blocks                                  uint32
	State                                   bool
	Window, Ring, Shards, Shard, Interleave uint32
}

type viewRecord struct {
	Layer, Part, DType, Region, Group uint16
	Cell, Units, First, Count, Tokens uint32
	Base, Block, Unit, Token          uint64
}

// Marshal returns the bytes that ParseSide takes: about 70 for each view. The error is that
// of Check.
func (s *Side) Marshal() ([]byte, error) {
	if err := s.Check(); err != nil {
		return nil, err
	}
	var names []byte
	number := make(map[string]uint16)
	name := func(text string) uint16 {
		n, ok := number[text]
		if !ok {
			n = uint16(len(number))
			number[text] = n
			names = append(append(names, byte(len(text))), text...)
		}
		return n
	}
	name(s.Model)
	regions, groups := make([]regionRecord, len(s.Regions)), make([]groupRecord, len(s.Groups))
	views := make([]viewRecord, len(s.Views))
	for i, a := range s.Regions {
		regions[i] = regionRecord{name(a.Name), a.Bytes}
	}
	for i, g := range s.Groups {
		groups[i] = groupRecord{g.Blocks, g.State, uint32(g.Window), uint32(g.Ring),
			uint32(g.Shards), uint32(g.Shard), uint32(g.Interleave)}
	}
	for i, v := range s.Views {
		views[i] = viewRecord{uint16(v.Layer), name(v.Part), name(v.DType), uint16(v.Region),
			uint16(v.Group), uint32(v.Cell), uint32(v.Units), uint32(v.First), uint32(v.Count),
			uint32(v.Tokens), v.Base, v.Block, v.Unit, v.Token}
	}
	if len(number) > namesMax {
		return nil, fmt.Errorf("side: %d names, want at most %d: %w", len(number), namesMax,
			ErrGeometry)
	}
	head := sideHead{[4]byte([]byte(sideMagic)), s.Version, uint32(s.Rank), uint32(s.DP),
		uint16(len(number)), uint16(len(regions)), uint16(len(groups)), uint32(len(views))}
	var b []byte
	for _, part := range []any{head, names, regions, groups, views} {
		b, _ = binary.Append(b, binary.LittleEndian, part) // all have fixed sizes
	}
	return b, nil
}

// ParseSide reads what Marshal wrote. It allocates no more than a small multiple of the
// length of b, whatever the bytes are, and keeps nothing of b. A side of another version is
// ErrSideVersion; other errors are ErrSideEncoding, or ErrGeometry for a side that Check refuses.
func ParseSide(b []byte) (*Side, error) {
	var head sideHead
	n, err := binary.Decode(b, binary.LittleEndian, &head)
	if err != nil || string(head.Magic[:]) != sideMagic {
		return nil, fmt.Errorf("parse side: %d bytes without a head: %w", len(b), ErrSideEncoding)
	}
	if head.Version != SideVersion {
		return nil, fmt.Errorf("parse side: version %d, this program takes %d: run the same "+
			"release on both sides: %w", head.Version, SideVersion, ErrSideVersion)
	}
	rest := b[n:]
	var names []string
	for range head.Names {
		if len(rest) == 0 || len(rest)-1 < int(rest[0]) {
			return nil, fmt.Errorf("parse side: a name cut short: %w", ErrSideEncoding)
		}
		end := 1 + int(rest[0])
		names, rest = append(names, string(rest[1:end])), rest[end:]
	}
	if want := uint64(head.Regions)*uint64(binary.Size(regionRecord{})) +
		uint64(head.Groups)*uint64(binary.Size(groupRecord{})) +
		uint64(head.Views)*uint64(binary.Size(viewRecord{})); uint64(len(rest)) != want ||
		len(names) == 0 {
		return nil, fmt.Errorf("parse side: %d names, and %d bytes of records in place of %d: %w",
			len(names), len(rest), want, ErrSideEncoding)
	}
	regions, groups := make([]regionRecord, head.Regions), make([]groupRecord, head.Groups)
	views := make([]viewRecord, head.Views)
	for _, part := range []any{regions, groups, views} {
		n, _ := binary.Decode(rest, binary.LittleEndian, part) // its length is right
		rest = rest[n:]
	}
	name := func(n uint16) string {
		if int(n) < len(names) {
			return names[n]
		}
		return "" // has another encoding
	}
	s := &Side{Version: head.Version, Model: names[0], Rank: int(head.Rank), DP: int(head.DP)}
	for _, r := range regions {
		s.Regions = append(s.Regions, Area{name(r.Name), r.Bytes})
	}
	for _, g := range groups {
		s.Groups = append(s.Groups, Group{g.Blocks, g.State, int(g.Window), int(g.Ring),
			int(g.Shards), int(g.Shard), int(g.Interleave)})
	}
	for _, v := range views {
		s.Views = append(s.Views, View{int(v.Layer), name(v.Part), name(v.DType), uint64(v.Cell),
			int(v.Units), int(v.First), int(v.Count), int(v.Tokens), int(v.Region), int(v.Group),
			v.Base, v.Block, v.Unit, v.Token})
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

// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"encoding/binary"
	"errors"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func sample(t testing.TB) *Side {
	t.Helper()
	spec, err := LookupSpec("gpt-oss-120b")
	require.NoError(t, err)
	s, err := NewSide(spec, Placement{Rank: 3, TP: 8, Blocks: 100, Ring: true, DP: 2})
	require.NoError(t, err)
	return s
}

func TestSideEncoding(t *testing.T) {
	s := sample(t)
	s.Regions[0].Name = strings.Repeat("x", nameMax)
	b, err := s.Marshal()
	require.NoError(t, err)
	got, err := ParseSide(b)
	require.NoError(t, err)
	require.Equal(t, s, got)
	for n := range b {
		_, err := ParseSide(b[:n])
		require.ErrorIs(t, err, ErrSideEncoding)
	}
	_, err = ParseSide(append(b, 0))
	require.ErrorIs(t, err, ErrSideEncoding)
	odd := slices.Clone(b) // the second group, which has no window, is a state: 2 in place of 1
	odd[len(b)-len(s.Views)*binary.Size(viewRecord{})-binary.Size(groupRecord{})+4] = 2
	_, err = ParseSide(odd)
	require.ErrorIs(t, err, ErrSideEncoding)
	b[4] = 9
	_, err = ParseSide(b)
	require.ErrorIs(t, err, ErrSideVersion)
	require.ErrorContains(t, err, "version 9, this program takes 1: run the same release")
}

func TestSideCheck(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Side)
		want   string
	}{
		"version":          {func(s *Side) { s.Version = 2 }, "version 2, this program takes 1"},
		"no model":         {func(s *Side) { s.Model = "" }, "model name"},
		"no views":         {func(s *Side) { s.Views = nil }, "0 views"},
		"view twice":       {func(s *Side) { s.Views[1] = s.Views[0] }, "twice"},
		"overlap":          {func(s *Side) { s.Views[0].Token-- }, "overlap"},
		"same cell":        {func(s *Side) { s.Views[0].Token = 0 }, "overlap"},
		"past the region":  {func(s *Side) { s.Views[0].Base = 1 << 40 }, "past the"},
		"stride overflows": {func(s *Side) { s.Views[0].Block = 1 << 62 }, "too large"},
		"base overflows":   {func(s *Side) { s.Views[0].Base = 1<<64 - 1 }, "past the"},
		"huge region":      {func(s *Side) { s.Regions[0].Bytes = 1 << 63 }, "region \"kv0\" of"},
		"no block":         {func(s *Side) { s.Groups[0].Blocks = 0 }, "0 blocks"},
		"units":            {func(s *Side) { s.Views[0].First = 8 }, "units 8 to 9 of 8"},
		"region":           {func(s *Side) { s.Views[0].Region = 9 }, "region 9 of 2"},
		"group":            {func(s *Side) { s.Views[0].Group = -1 }, "group -1"},
		"small ring":       {func(s *Side) { s.Groups[0].Ring = 1 }, "a ring of 16 tokens"},
		"shard":            {func(s *Side) { s.Groups[1].Shard = 1 }, "shard 1 of 0"},
		"cell":             {func(s *Side) { s.Views[0].Cell = 0 }, "cells of 0 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			s := sample(t)
			c.change(s)
			require.ErrorContains(t, s.Check(), c.want)
			_, err := s.Marshal()
			require.Error(t, err)
		})
	}
}

// FuzzParseSide: what is accepted has one encoding, and no input costs more than a small
// multiple of its length.
func FuzzParseSide(f *testing.F) {
	small := sample(f)
	small.Views = small.Views[:2]
	b, err := small.Marshal()
	require.NoError(f, err)
	f.Add(b)
	f.Add([]byte(sideMagic))
	head := binary.Size(sideHead{})
	many := append([]byte(nil), b[:head]...)
	binary.LittleEndian.PutUint32(many[head-4:], 1<<31)
	f.Add(many)
	f.Fuzz(func(t *testing.T, b []byte) {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		s, err := ParseSide(b)
		runtime.ReadMemStats(&after)
		require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(64<<10+20*len(b)))
		if err != nil {
			require.Nil(t, s)
			return
		}
		again, err := s.Marshal()
		require.NoError(t, err)
		require.Equal(t, b, again)
		p, err := NewPlan([]*Side{s}, []*Side{s})
		if err != nil {
			return
		}
		table := make([]uint32, 4)
		tables := make(Tables, len(s.Groups))
		for i := range tables {
			tables[i] = table
		}
		for _, e := range p.Edges(0) {
			_, err := e.Layer(nil, e.Layers[0], tables, tables, Span{1, 1 + uint64(len(b)%99)})
			require.True(t, err == nil || errors.Is(err, ErrRequest))
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"bytes"
	"errors"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// nest is a pattern at random, that fits in n bytes on both sides, and writes no byte twice.
func (l *testLink) nest(r *rand.Rand, n uint64) *driver.Pattern {
	p := l.pattern(1+r.IntN(5), uint64(1+r.IntN(200)), 0, 0)
	local, remote := p.Run, p.Run
	for range r.IntN(4) {
		gap := func() uint64 { return uint64(r.IntN(2) * r.IntN(50)) }
		loop := driver.Loop{N: uint32(1 + r.IntN(4)), Local: local + gap(), Remote: remote + gap()}
		local, remote = uint64(loop.N)*loop.Local, uint64(loop.N)*loop.Remote
		p.Loops = append([]driver.Loop{loop}, p.Loops...) // outermost first
	}
	side := func(s *driver.Side, extent uint64) {
		s.Base = uint64(r.IntN(100))
		if r.IntN(2) == 0 {
			s.Per = uint32(2 + r.IntN(3))
			s.First, s.Step = uint32(r.IntN(int(s.Per))), extent+uint64(r.IntN(20))
			extent = uint64(s.Per) * s.Step
		}
		s.Stride = extent + uint64(r.IntN(20))
		slots := p.Count
		if s.Per > 1 {
			slots = (int(s.First) + p.Count + int(s.Per) - 1) / int(s.Per)
		}
		if r.IntN(2) == 0 {
			for _, slot := range r.Perm(slots + 3)[:slots] {
				s.List = append(s.List, uint32(slot))
			}
		}
	}
	side(&p.Local, local)
	side(&p.Remote, remote)
	if p.Check(n, n) != nil {
		return l.nest(r, n)
	}
	return p
}

// TestNest moves patterns of any form, and compares with their runs.
func TestNest(t *testing.T) {
	shape := testShape{spin: true, pairs: 2, config: Config{SliceMax: 4096}}
	l := openLink(t, fakeDevices(t, 2), shape)
	const n = 256 << 10
	r := rand.New(rand.NewPCG(7, 7))
	for round := range 300 {
		p, op := l.nest(r, n), driver.Op(driver.Read)
		if round%2 == 0 {
			op = driver.Write
		}
		fill(l.local[:n], r.Uint64())
		fill(l.remote[:n], r.Uint64())
		local, remote := bytes.Clone(l.local[:n]), bytes.Clone(l.remote[:n])
		for i := range p.Count {
			for _, d := range p.AppendDescs(nil, i) {
				if op == driver.Write {
					copy(remote[d.Remote:][:d.Len], local[d.Local:])
				} else {
					copy(local[d.Local:][:d.Len], remote[d.Remote:])
				}
			}
		}
		l.tag++
		require.NoError(t, l.conn.Submit(l.tag, &driver.Batch{Op: op, Pattern: p}))
		require.NoError(t, l.outcome(t, l.tag))
		same := bytes.Equal(local, l.local[:n]) && bytes.Equal(remote, l.remote[:n])
		require.True(t, same, "round %d: %v of %+v", round, op, p)
	}
}

// TestNestMerges counts requests: runs that lie together at the peer go in one, whatever
// lies between them here.
func TestNestMerges(t *testing.T) {
	l := openLink(t, fakeDevices(t, 1), testShape{spin: true})
	rail, err := l.near.Rail(0)
	require.NoError(t, err)
	p := l.pattern(8, 64, 64<<10, 64*4*8)
	p.Loops = []driver.Loop{{N: 4, Local: 8192, Remote: 64 * 8}, {N: 8, Local: 256, Remote: 64}}
	before := l.counters(t)
	l.tag++
	require.NoError(t, l.conn.Submit(l.tag, &driver.Batch{Op: driver.Write, Pattern: p}))
	require.NoError(t, l.outcome(t, l.tag))
	most := uint64((p.Count*p.Runs() + rail.SGEMax - 1) / rail.SGEMax)
	require.LessOrEqual(t, l.counters(t).Requests-before.Requests, most)
}

// TestNestBounds refuses what leaves the memory, overflows, or has lists of another length, and
// names the entry where it is one.
func TestNestBounds(t *testing.T) {
	l := openLink(t, fakeDevices(t, 1), testShape{})
	good := func() *driver.Pattern {
		p := l.pattern(4, 64, 8192, 8192)
		p.Loops = []driver.Loop{{N: 4, Local: 1024, Remote: 1024}, {N: 4, Local: 64, Remote: 64}}
		return p
	}
	for name, spoil := range map[string]func(p *driver.Pattern){
		"a loop far out": func(p *driver.Pattern) {
			p.Loops[0].Remote = testBytes
		},
		"a loop that overflows": func(p *driver.Pattern) {
			p.Loops[1].Local = math.MaxUint64 / 2
		},
		"no turn": func(p *driver.Pattern) {
			p.Loops[0].N = 0
		},
		"many turns": func(p *driver.Pattern) {
			p.Loops[0].N, p.Loops[1].N = math.MaxUint32, math.MaxUint32
		},
		"many loops": func(p *driver.Pattern) {
			p.Loops = make([]driver.Loop, driver.LoopsMax+1)
		},
		"a short list": func(p *driver.Pattern) {
			p.Local.List = []uint32{1, 2, 3}
		},
		"a long list of slots": func(p *driver.Pattern) {
			p.Local.Per, p.Local.List = 2, []uint32{1, 2, 3}
		},
		"a far slot": func(p *driver.Pattern) {
			p.Remote.List = []uint32{0, 1, math.MaxUint32, 2}
		},
		"a far step": func(p *driver.Pattern) {
			p.Remote.Per, p.Remote.Step = 4, testBytes
		},
		"a step that overflows": func(p *driver.Pattern) {
			p.Remote.Per, p.Remote.Step = 2, math.MaxUint64
		},
	} {
		p := good()
		spoil(p)
		err := l.conn.Submit(1, &driver.Batch{Op: driver.Write, Pattern: p})
		require.ErrorIs(t, err, driver.ErrBounds, name)
		if name == "a far slot" {
			var piece *driver.PieceError
			require.True(t, errors.As(err, &piece))
			require.Equal(t, 2, piece.Piece, "the entry")
		}
	}
	l.tag++
	require.NoError(t, l.conn.Submit(l.tag, &driver.Batch{Op: driver.Write, Pattern: good()}))
	require.NoError(t, l.outcome(t, l.tag))
}

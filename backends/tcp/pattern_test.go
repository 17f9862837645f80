// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"bytes"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// randomSide makes a side of entries of a given extent within a memory of so many bytes.
func randomSide(r *rand.Rand, count int, extent, size uint64) driver.Side {
	s := driver.Side{Base: r.Uint64N(100)}
	if r.IntN(2) == 0 {
		s.Per = uint32(1 + r.IntN(5))
	}
	per := uint64(max(1, s.Per))
	if s.Per > 1 {
		s.First = uint32(r.IntN(int(s.Per)))
		s.Step = extent + r.Uint64N(3)*8
	}
	s.Stride = extent + (per-1)*s.Step + r.Uint64N(64)
	slots := int((uint64(s.First) + uint64(count) + per - 1) / per)
	room := (size-s.Base-extent-(per-1)*s.Step)/s.Stride + 1
	if r.IntN(4) > 0 && room >= uint64(slots) {
		for _, slot := range r.Perm(int(min(room, 1<<16)))[:slots] {
			s.List = append(s.List, uint32(slot))
		}
	}
	return s
}

// randomPattern makes a pattern that stays within memories of size bytes.
func randomPattern(r *rand.Rand, size uint64) driver.Pattern {
	for {
		t := driver.Pattern{Run: 1 + r.Uint64N(1<<r.IntN(15)), Count: 1 + r.IntN(1<<r.IntN(13))}
		near, far := t.Run, t.Run
		for range r.IntN(driver.LoopsMax + 1) {
			l := driver.Loop{N: uint32(1 + r.IntN(5)), Local: near + r.Uint64N(50),
				Remote: far + r.Uint64N(50)}
			near += uint64(l.N-1) * l.Local
			far += uint64(l.N-1) * l.Remote
			t.Loops = append([]driver.Loop{l}, t.Loops...)
		}
		if 8*uint64(t.Count)*max(near, far) > size {
			continue
		}
		t.Local, t.Remote = randomSide(r, t.Count, near, size), randomSide(r, t.Count, far, size)
		if t.Check(size, size) == nil {
			return t
		}
	}
}

// Patterns of all forms move as their runs do one by one, both ways, in parts of any cut.
func TestPatternsMoveAsTheirRuns(t *testing.T) {
	testkit.CheckLeaks(t)
	const size = 1 << 20
	owner, near := open(t, Config{}), open(t, Config{})
	far, away := share(t, owner, size)
	m, local := share(t, near, size)
	p := dial(t, near, owner.Addr())
	key := importKey(t, p, far)
	r, noise := rand.New(rand.NewPCG(3, 4)), rand.NewChaCha8([32]byte{5})
	for round := range 150 {
		g := randomPattern(r, size)
		g.LocalKey, g.RemoteKey = m.key, key
		op := []driver.Op{driver.Write, driver.Read}[round%2]
		from, to := local, away
		if op == driver.Read {
			from, to = away, local
		}
		_, _ = noise.Read(from) // never fails
		clear(to)
		want := make([]byte, size)
		var runs []driver.Desc
		for i := range g.Count {
			runs = g.AppendDescs(runs[:0], i)
			for _, d := range runs {
				if op == driver.Write {
					copy(want[d.Remote:][:d.Len], local[d.Local:])
				} else {
					copy(want[d.Local:][:d.Len], away[d.Remote:])
				}
			}
		}
		require.NoError(t, p.Submit(1, &driver.Batch{Op: op, Pattern: &g}))
		require.NoError(t, await(t, near, 1))
		require.True(t, bytes.Equal(want, to), "%v of %+v", op, g)
	}
}

// A fragment costs 4 bytes a slot that is listed, and decodes to what it was.
func TestFragment(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	slots := make([]uint32, slotsMax)
	for range 200 {
		g := randomPattern(r, 1<<20)
		g.Local = driver.Side{}
		for i := range g.Loops {
			g.Loops[i].Local = 0
		}
		if len(g.Remote.List) > slotsMax {
			continue
		}
		f := fragment{pattern: g, skip: r.Uint64N(g.EntryLen())}
		f.bytes = min(g.Bytes()-f.skip, partBytes)
		b := f.append(nil)
		require.Len(t, b, patternBytes+slotBytes*len(g.Remote.List))
		var got fragment
		require.True(t, got.decode(b, slots))
		if len(g.Loops) == 0 {
			g.Loops = got.pattern.Loops
		}
		require.Equal(t, g, got.pattern)
		require.Equal(t, [2]uint64{f.skip, f.bytes}, [2]uint64{got.skip, got.bytes})
		require.True(t, got.check(1<<20))
		got.bytes = g.Bytes() - f.skip + 1
		require.False(t, got.check(1<<20), "more bytes than the pattern has")
	}
	require.False(t, new(fragment).decode(make([]byte, patternBytes-1), slots))
	require.False(t, new(fragment).check(1<<20), "an empty fragment")
}

// TestHugePatternsOverRangesAreBounded: a frame of a hundred bytes that names the same few bytes
// very often does not keep the owner busy for hours, whether it is refused or not.
func TestHugePatternsOverRangesAreBounded(t *testing.T) {
	seg := driver.Segment{Kind: driver.DRAM, Len: 64, Mem: make([]byte, 64),
		Only: driver.Ranges{{Off: 0, Len: 8}, {Off: 16, Len: 8}}}
	f := fragment{bytes: 64, pattern: driver.Pattern{Run: 1, Count: math.MaxInt32,
		Loops: []driver.Loop{{N: 2, Remote: 16}, {N: 1 << 29}}}}
	h, body := header{flags: flagPattern}, f.append(nil)
	ended := make(chan session.Status, 1)
	go func() {
		_, status := new(chunk).rangesOf(&h, body, &seg)
		ended <- status
	}()
	select {
	case <-ended:
	case <-time.After(limit):
		require.Fail(t, "one frame keeps the owner busy")
	}
}

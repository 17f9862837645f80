// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
)

// limited is mem whose Peers take less, in smaller batches.
type limited struct {
	*mem.Backend
	runs   int
	lenMax uint64
	can    driver.Can
}

func (b limited) Caps() driver.Caps {
	c := b.Backend.Caps()
	c.RunsMax, c.LenMax, c.DescsMax = b.runs, b.lenMax, 5
	return c
}

func (b limited) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	p, err := b.Backend.Connect(ctx, addr)
	return limitedPeer{p, b.can}, err
}

type limitedPeer struct {
	driver.Peer
	can driver.Can
}

func (p limitedPeer) Can() driver.Can { return p.can }

func (p limitedPeer) Submit(tag uint64, b *driver.Batch) error {
	if err := b.Check(p.can); err != nil {
		return err
	}
	return p.Peer.Submit(tag, b)
}

// TestPatterns moves nests of loops and slots of several entries over peers that take them,
// cut where the backend has a limit, and over peers that do not, run by run.
func TestPatterns(t *testing.T) {
	const all = driver.CanPattern | driver.CanNotify
	lists := Side{Base: 100, Stride: 4096, Step: 300, First: 1, Per: 4, List: []uint32{5, 2, 7, 0,
		9, 4}}
	count := Side{Base: 8, Stride: 1300, Per: 1}
	for name, p := range map[string]Pattern{
		"plain": {Run: 64, Count: 20, Local: Side{Stride: 64}, Remote: Side{Base: 3, Stride: 100}},
		"slots": {Run: 200, Count: 21, Local: count, Remote: lists},
		"both": {Run: 50, Count: 21, Local: lists, Remote: Side{Stride: 400, Step: 60, Per: 3,
			First: 2}},
		"a nest": {Run: 16, Count: 21, Loops: []Loop{{N: 2, Local: 64, Remote: 128},
			{N: 3, Local: 16, Remote: 32}}, Local: count, Remote: lists},
		"deep": {Run: 8, Count: 5, Loops: []Loop{{N: 2, Local: 100, Remote: 400},
			{N: 2, Local: 40, Remote: 150}, {N: 2, Local: 8, Remote: 60}}, Local: count,
			Remote: count},
	} {
		for _, b := range []limited{{runs: 1 << 16, can: all}, {runs: 13, can: all},
			{runs: 2, can: all},
			{can: driver.CanNotify},
			{runs: 100, lenMax: 7, can: all}} {
			t.Run(fmt.Sprintf("%s, %d runs of %d, %b", name, b.runs, b.lenMax, b.can),
				func(t *testing.T) {
					movePattern(t, b, p)
				})
		}
	}
}

func movePattern(t *testing.T, limits limited, p Pattern) {
	over := func(c *Config) {
		limits.Backend, _ = mem.New(mem.Config{})
		c.Backends = []driver.Backend{limits}
	}
	a, b := open(t, "a", over), open(t, "b", over)
	src, dst := register(t, a, "src", 1<<16), register(t, b, "dst", 1<<16)
	fill(src.Bytes(), 7)
	peer := connect(t, a, b)
	want := make([]byte, dst.Size())
	var runs []driver.Desc
	for i := range p.Count {
		for _, d := range p.AppendDescs(runs[:0], i) {
			copy(want[d.Remote:][:d.Len], src.Bytes()[d.Local:])
		}
	}
	tr := transfer(t, peer, Write)
	check(t, tr.AddPattern(src, remote(t, peer, "dst"), p))
	check(t, tr.Notify([]byte("all")))
	for range 2 {
		clear(dst.Bytes())
		run(t, tr)
		next(t, b)
		require.True(t, bytes.Equal(want, dst.Bytes()))
	}
	p.Remote.Base = 1 << 16
	check(t, tr.Reset())
	require.ErrorIs(t, tr.AddPattern(src, remote(t, peer, "dst"), p), ErrBounds)
}

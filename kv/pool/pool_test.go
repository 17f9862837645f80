// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"errors"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
)

func TestAcquireAllOrNone(t *testing.T) {
	p := newPool(t, 4)
	a := take(t, p, 1, 2, 3)
	if !slices.Equal(a.Missing, []int{0, 1, 2}) {
		t.Errorf("missing %v in an empty pool", a.Missing)
	}
	if _, err := p.TryAcquire(hashes(4, 5)); !errors.Is(err, ErrFull) {
		t.Errorf("2 blocks where 1 is free: %v", err)
	}
	if _, err := p.TryAcquire(hashes(1, 2, 3, 4, 5)); !errors.Is(err, ErrTooLarge) {
		t.Errorf("5 blocks of 4: %v", err)
	}
	want(t, p, 1, 3, 0)
	b := take(t, p, 4)
	want(t, p, 0, 4, 0)
	a.Release()
	a.Release()
	b.Release()
	want(t, p, 4, 0, 0)
}

func TestOnlyPublishedBlocksAreShared(t *testing.T) {
	p := newPool(t, 8)
	a := take(t, p, 1, 2, 3)
	a.Publish(0)
	a.Publish(2)
	b := take(t, p, 1, 2, 3)
	if !slices.Equal(b.Missing, []int{1}) || b.Blocks[0] != a.Blocks[0] ||
		b.Blocks[1] == a.Blocks[1] || b.Blocks[2] != a.Blocks[2] {
		t.Errorf("shared %v of %v, missing %v", b.Blocks, a.Blocks, b.Missing)
	}
	a.Release()
	want(t, p, 5, 3, 0) // block 2 of a was its own
	b.Publish(1)
	b.Release()
	want(t, p, 5, 0, 3)
	if c := take(t, p, 1, 2, 3); len(c.Missing) != 0 || !slices.Equal(c.Blocks, b.Blocks) {
		t.Errorf("cached %v, got %v, missing %v", b.Blocks, c.Blocks, c.Missing)
	}
	want(t, p, 5, 3, 0)
	if s := p.Stats(); s.Hits != 5 || s.Misses != 4 || s.Evictions != 0 {
		t.Errorf("%d hits, %d misses, %d evictions", s.Hits, s.Misses, s.Evictions)
	}
}

func TestSameContentTwiceIsPublishedOnce(t *testing.T) {
	p := newPool(t, 4)
	a, b := take(t, p, 1), take(t, p, 1)
	a.Publish(0)
	b.Publish(0)
	b.Release()
	want(t, p, 3, 1, 0)
	a.Release()
	a.Publish(0) // too late
	want(t, p, 3, 0, 1)
}

func TestPrivateBlocksAreNeverShared(t *testing.T) {
	p := newPool(t, 4)
	private := []Hash{{}, {}}
	a, err := p.TryAcquire(private)
	if err != nil || len(a.Missing) != 2 {
		t.Fatalf("%+v, %v", a, err)
	}
	a.Publish(0)
	a.Publish(7)
	a.Release()
	want(t, p, 4, 0, 0)
	if HashOf(0).Private() {
		t.Error("the number 0 names nothing")
	}
}

func TestOldestUnusedIsEvicted(t *testing.T) {
	p := newPool(t, 4)
	for _, id := range []uint64{1, 2, 3, 4} {
		fill(take(t, p, id))
	}
	fill(take(t, p, 1)) // used again: now the youngest
	pinned := take(t, p, 2)
	fill(take(t, p, 5))
	if g := take(t, p, 3); len(g.Missing) != 1 {
		t.Error("block 3 was the oldest, and is still there")
	} else {
		g.Release()
	}
	if g := take(t, p, 1, 2, 5); len(g.Missing) != 0 {
		t.Errorf("of 1, 2, 5 missing %v", g.Missing)
	} else {
		g.Release()
	}
	pinned.Release()
}

func TestEndOfAPrefixIsEvictedFirst(t *testing.T) {
	p := newPool(t, 3)
	fill(take(t, p, 1, 2, 3))
	fill(take(t, p, 9))
	if g := take(t, p, 1, 2); len(g.Missing) != 0 {
		t.Errorf("of the prefix 1, 2 missing %v", g.Missing)
	}
}

// TestFoundBlocksAreNotEvictedForTheSameRequest: 2 of 3 blocks are known, and
// counting them as room as well would take one of them away.
func TestFoundBlocksAreNotEvictedForTheSameRequest(t *testing.T) {
	p := newPool(t, 4)
	fill(take(t, p, 1, 2))
	busy := take(t, p, 8)
	g := take(t, p, 7, 1, 2)
	if !slices.Equal(g.Missing, []int{0}) || slices.Contains(g.Blocks[1:], g.Blocks[0]) {
		t.Errorf("blocks %v, missing %v", g.Blocks, g.Missing)
	}
	g.Release()
	if _, err := p.TryAcquire(hashes(1, 2, 5, 6)); !errors.Is(err, ErrFull) {
		t.Errorf("2 known and 2 new blocks with 1 free: %v", err)
	}
	want(t, p, 1, 1, 2)
	busy.Release()
}

func TestRandomUseKeepsTheBooks(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	p := newPool(t, 32)
	var held []*Grant
	for range 20000 {
		if len(held) > 0 && r.IntN(2) == 0 {
			i := r.IntN(len(held))
			for _, at := range held[i].Missing[:r.IntN(len(held[i].Missing)+1)] {
				held[i].Publish(at)
			}
			held[i].Release()
			held = slices.Delete(held, i, i+1)
		} else if g, err := p.TryAcquire(chainOf(r, 1+r.IntN(8))); err == nil {
			held = append(held, g)
		} else if !errors.Is(err, ErrFull) {
			t.Fatal(err)
		}
		audit(t, p, held)
	}
	for _, g := range held {
		g.Release()
	}
	if s := p.Stats(); s.Used != 0 || s.Free+s.Cached != 32 || s.Hits == 0 || s.Evictions == 0 {
		t.Errorf("at the end %+v", s)
	}
}

// audit checks the books against the grants.
func audit(t *testing.T, p *Pool, held []*Grant) {
	t.Helper()
	refs := map[uint32]int{}
	for _, g := range held {
		for _, i := range g.Blocks {
			refs[i]++
		}
	}
	s := p.Stats()
	if s.Used != len(refs) || s.Free+s.Used+s.Cached != s.Blocks {
		t.Fatalf("%d blocks held, %+v", len(refs), s)
	}
	for i := range p.blocks {
		if b := &p.blocks[i]; b.refs != refs[uint32(i)] || b.published &&
			p.known[b.hash] != uint32(i) {
			t.Fatalf("block %d: %+v, held %d times", i, *b, refs[uint32(i)])
		}
	}
	for h, i := range p.known {
		if b := &p.blocks[i]; !b.published || b.hash != h {
			t.Fatalf("%x names block %d: %+v", h, i, *b)
		}
	}
}

func TestRefusesBadSizes(t *testing.T) {
	for _, n := range []int{-1, 0, 1<<31 + 1} {
		if _, err := New(n); err == nil {
			t.Errorf("a pool of %d blocks", n)
		}
	}
	p := newPool(t, 1)
	p.Close()
	p.Close()
	if _, err := p.TryAcquire(hashes(1)); !errors.Is(err, os.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

func TestRetiredBlocksDoNotComeBack(t *testing.T) {
	p := newPool(t, 4)
	fill(take(t, p, 1))
	g := take(t, p, 1, 2, 3)
	g.Retire(0, nil) // others may hold it: it is not this request's to retire
	g.Retire(1, nil)
	g.Retire(1, nil)
	g.Publish(1)
	if _, err := p.TryAcquire(hashes(5, 6, 7, 8)); !errors.Is(err, ErrTooLarge) {
		t.Errorf("4 blocks where 3 are left: %v", err)
	}
	g.Release()
	g.Retire(2, nil) // too late
	want(t, p, 2, 0, 1)
	if s := p.Stats(); s.Retired != 1 {
		t.Errorf("%d blocks retired", s.Retired)
	}
	gone := g.Blocks[1]
	if all := take(t, p, 5, 6, 7); slices.Contains(all.Blocks, gone) {
		t.Errorf("block %d was retired and given out", gone)
	}
	if _, err := p.TryAcquire(hashes(5, 6, 7, 8)); !errors.Is(err, ErrTooLarge) {
		t.Errorf("4 blocks where 3 are left: %v", err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func newPool(t *testing.T, blocks int) *Pool {
	t.Helper()
	p, err := New(blocks)
	require.NoError(t, err)
	return p
}

func hashes(ids ...uint64) []Hash {
	h := make([]Hash, len(ids))
	for i, id := range ids {
		h[i] = HashOf(id)
	}
	return h
}

// chainOf is the prompt of a random one of four conversations.
func chainOf(r *rand.Rand, n int) []Hash {
	from := uint64(100 * r.IntN(4))
	h := make([]Hash, n)
	for i := range h {
		h[i] = HashOf(from + uint64(i))
	}
	return h
}

func take(t *testing.T, p *Pool, ids ...uint64) *Grant {
	t.Helper()
	g, err := p.TryAcquire(hashes(ids...))
	require.NoError(t, err)
	return g
}

// fill publishes all blocks of a grant and releases it.
func fill(g *Grant) {
	for i := range g.Blocks {
		g.Publish(i)
	}
	g.Release()
}

func want(t *testing.T, p *Pool, free, used, cached int) {
	t.Helper()
	if s := p.Stats(); s.Free != free || s.Used != used || s.Cached != cached {
		t.Errorf("%d free, %d used, %d cached, want %d, %d, %d", s.Free, s.Used, s.Cached, free,
			used, cached)
	}
}

func BenchmarkAcquireRelease(b *testing.B) {
	p, _ := New(1024)
	h := make([]Hash, 24)
	for i := range h {
		h[i] = HashOf(uint64(i))
	}
	for b.Loop() {
		g, err := p.TryAcquire(h)
		if err != nil {
			b.Fatal(err)
		}
		fill(g)
	}
}

// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/kv/layout"
	"github.com/sluicehq/sluice/kv/pool"
)

func TestHandsOverEveryByte(t *testing.T) {
	for _, model := range []layout.Model{small, large} {
		for _, order := range []layout.Arrangement{layout.BlockMajor, layout.LayerMajor} {
			t.Run(model.Name+" from "+order.String(), func(t *testing.T) {
				over(t, func(t *testing.T, open func(testing.TB) driver.Backend) {
					handsOverEveryByte(t, open, model, order)
				})
			})
		}
	}
}

func handsOverEveryByte(t *testing.T, open func(testing.TB) driver.Backend, model layout.Model,
	order layout.Arrangement) {
	p := newPair(t, setup{backend: open, model: model, order: order})
	ids := []uint64{0, 11, 12, 13, 14}
	q := p.handOver(t, 1, ids...)
	p.checkUntouched(t, q.Blocks)
	q.Release()
	q.Release()
	if s, r := p.sender.Stats(), p.receiver.Stats(); s.Finished != 1 || r.Finished != 1 ||
		s.Strays+r.Strays != 0 {
		t.Errorf("sender: %+v, receiver: %+v", s, r)
	}
	if s := p.pool.Stats(); s.Cached != 5 || s.Used != 0 {
		t.Errorf("pool: %+v", s)
	}
}

// checkUntouched checks that all of the decode side's pool but these blocks is
// as it was.
func (p *pair) checkUntouched(t *testing.T, blocks []uint32) {
	t.Helper()
	memory, g := p.decode.region.Bytes(), p.decode.geometry
	for block := range g.Blocks() {
		from := block * g.Stride()
		if slices.Contains(blocks, uint32(block)) {
			from += g.BlockBytes() // the gap behind it is nobody's
		}
		for i, b := range memory[from : (block+1)*g.Stride()] {
			if b != poison {
				t.Fatalf("byte %d behind block %d is %#x", i, block, b)
			}
		}
	}
}

func TestReusesPrefixes(t *testing.T) { over(t, reusesPrefixes) }

func reusesPrefixes(t *testing.T, open func(testing.TB) driver.Backend) {
	p := newPair(t, setup{backend: open})
	a := p.handOver(t, 1, 0, 1, 2, 3)
	b := p.handOver(t, 2, 0, 1, 2, 8, 9) // while a is in use
	if !slices.Equal(b.Missing, []int{3, 4}) || !slices.Equal(a.Blocks[:3], b.Blocks[:3]) {
		t.Errorf("blocks %v, then %v, missing %v", a.Blocks, b.Blocks, b.Missing)
	}
	a.Release()
	b.Release()
	c := p.handOver(t, 3, 0, 1, 2, 3) // nothing is missing
	if len(c.Missing) != 0 {
		t.Errorf("missing %v of blocks that were all there", c.Missing)
	}
	c.Release()
}

// TestOnlyMissingBlocksNeedContent: a prefill side that learns from the Push what
// is missing may leave the rest as it is.
func TestOnlyMissingBlocksNeedContent(t *testing.T) { over(t, onlyMissingBlocksNeedContent) }

func onlyMissingBlocksNeedContent(t *testing.T, open func(testing.TB) driver.Backend) {
	for _, order := range []layout.Arrangement{layout.BlockMajor, layout.LayerMajor} {
		p := newPair(t, setup{backend: open, order: order})
		p.handOver(t, 1, 7, 3, 9).Release() // hashes stand alone here: 3 and 7 are found again
		ids := []uint64{5, 3, 6, 7, 4}
		blocks := p.request(t, ids...)
		push, err := p.sender.Begin(within(t), p.prefill.peer, 2, blocks)
		require.NoError(t, err)
		if got := push.MissingBlocks(); !slices.Equal(got, []int{0, 2, 4}) {
			t.Errorf("missing %v", got)
		}
		for _, i := range []uint32{1, 3} { // decode has them
			p.prefill.each(t, i, func(_, _ int, b []byte) { clear(b) })
		}
		p.push(t, push)
		q, err := p.receiver.Accept(within(t))
		require.NoError(t, err)
		<-q.Done()
		if q.Err() != nil || !slices.Equal(q.Missing, push.MissingBlocks()) {
			t.Errorf("decode lacks %v, ended with %v", q.Missing, q.Err())
		}
		for layer := range p.decode.geometry.Layers() {
			p.checkLayer(t, q, layer, ids)
		}
		q.Release()
	}
}

func TestPrivateBlocksAreMovedEachTime(t *testing.T) {
	p := newPair(t, setup{})
	blocks := p.request(t, 5, 6)
	blocks[1].Hash = pool.Hash{}
	for round := range 2 {
		push, err := p.sender.Begin(within(t), p.prefill.peer, 1, blocks)
		require.NoError(t, err)
		if len(push.missing) != 2-round {
			t.Errorf("round %d: %d blocks are missing", round, len(push.missing))
		}
		p.push(t, push)
		q, _ := p.receiver.Accept(within(t))
		q.Release()
	}
}

// push pushes all layers and finishes.
func (p *pair) push(t testing.TB, push *Push) {
	t.Helper()
	for layer := range p.prefill.geometry.Layers() {
		require.NoError(t, push.Layer(within(t), layer))
	}
	require.NoError(t, push.Finish(within(t)))
}

func TestLayersInAnyOrderByManyGoroutines(t *testing.T) {
	over(t, layersInAnyOrderByManyGoroutines)
}

func layersInAnyOrderByManyGoroutines(t *testing.T, open func(testing.TB) driver.Backend) {
	p := newPair(t, setup{backend: open, model: large, sender: func(c *SenderConfig) {
		c.Window = 2
	}})
	ids := []uint64{1, 2, 3}
	push, q := p.begin(t, 1, ids...)
	var all sync.WaitGroup
	for _, layer := range []int{3, 1, 0, 2} {
		all.Go(func() {
			if err := push.Layer(within(t), layer); err != nil {
				t.Error(err)
			}
		})
	}
	var seen []int
	for len(seen) < 4 {
		layer := <-q.Ready()
		p.checkLayer(t, q, layer, ids)
		seen = append(seen, layer)
	}
	all.Wait()
	if slices.Sort(seen); !slices.Equal(seen, []int{0, 1, 2, 3}) {
		t.Errorf("layers %v", seen)
	}
	require.NoError(t, push.Finish(within(t)))
	q.Release()
}

// TestManyRequestsAtOnce runs more requests than the pool has room for.
func TestManyRequestsAtOnce(t *testing.T) { over(t, manyRequestsAtOnce) }

func manyRequestsAtOnce(t *testing.T, open func(testing.TB) driver.Backend) {
	const requests = 60
	p := newPair(t, setup{backend: open, blocks: 12})
	blocks := p.request(t, 0, 1, 2, 3, 4, 5, 6, 7)
	var all sync.WaitGroup
	for n := range uint64(requests) {
		all.Go(func() {
			push, err := p.sender.Begin(within(t), p.prefill.peer, n, blocks[:1+n%8])
			if err != nil {
				t.Errorf("request %d: %v", n, err)
				return
			}
			p.push(t, push)
		})
	}
	for range requests {
		q, err := p.receiver.Accept(within(t))
		require.NoError(t, err)
		all.Go(func() {
			<-q.Done()
			if q.Err() != nil {
				t.Errorf("request %d: %v", q.ID, q.Err())
			}
			for layer := range p.decode.geometry.Layers() {
				p.checkLayer(t, q, layer, []uint64{0, 1, 2, 3, 4, 5, 6, 7})
			}
			q.Release()
		})
	}
	all.Wait()
	s, r := p.sender.Stats(), p.receiver.Stats()
	if s.Finished != requests || r.Finished != requests || p.pool.Stats().Hits == 0 {
		t.Errorf("sender %+v, receiver %+v", s, r)
	}
}

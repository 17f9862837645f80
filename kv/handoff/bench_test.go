// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"testing"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/kv/layout"
)

// BenchmarkRequest hands 24 private blocks of deepseek-v3.2 over, of 16 tokens
// each, in 61 layers of 303 KB, beside a copy of the same pieces.
func BenchmarkRequest(b *testing.B) {
	model, err := layout.Lookup("deepseek-v3.2")
	if err != nil {
		b.Fatal(err)
	}
	for name, open := range map[string]func(testing.TB) driver.Backend{"mem": newMem,
		"shm": newShm} {
		b.Run(name, func(b *testing.B) {
			p := newPair(b, setup{model: model, backend: open, blocks: 32})
			blocks := make([]Block, 24)
			for i := range blocks {
				blocks[i].Local = uint32(i)
			}
			b.SetBytes(int64(len(blocks)) * int64(p.decode.geometry.BlockBytes()))
			b.ReportAllocs()
			for b.Loop() {
				p.benchOne(b, blocks)
			}
		})
	}
	b.Run("memcpy", func(b *testing.B) {
		p := newPair(b, setup{model: model, blocks: 32})
		b.SetBytes(24 * int64(p.decode.geometry.BlockBytes()))
		for b.Loop() {
			p.copyOne(24)
		}
	})
}

func (p *pair) benchOne(b *testing.B, blocks []Block) {
	ctx := context.Background()
	push, err := p.sender.Begin(ctx, p.prefill.peer, 1, blocks)
	if err != nil {
		b.Fatal(err)
	}
	q, err := p.receiver.Accept(ctx)
	if err != nil {
		b.Fatal(err)
	}
	for layer := range p.prefill.geometry.Layers() {
		if err := push.Layer(ctx, layer); err != nil {
			b.Fatal(err)
		}
	}
	if err := push.Finish(ctx); err != nil {
		b.Fatal(err)
	}
	<-q.Done()
	q.Release()
}

// copyOne copies what benchOne hands over, layer by layer.
func (p *pair) copyOne(blocks int) {
	from, to := &p.prefill, &p.decode
	n := from.geometry.LayerBytes()
	for layer := range from.geometry.Layers() {
		for block := range blocks {
			a, _ := from.geometry.Piece(uint64(block), layer, 0)
			c, _ := to.geometry.Piece(uint64(block), layer, 0)
			copy(to.region.Bytes()[c.Off:c.Off+n], from.region.Bytes()[a.Off:a.Off+n])
		}
	}
}

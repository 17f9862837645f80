// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// all digests every layer.
func all(int) bool { return true }

// scaled is a public model with few layers and small cells.
func scaled(t testing.TB, name string, layers int) layout.Spec {
	t.Helper()
	spec, err := layout.LookupSpec(name)
	require.NoError(t, err)
	for i := range spec.Tensors {
		x := &spec.Tensors[i]
		var list []int
		for _, l := range x.Layers {
			if l < layers {
				list = append(list, l)
			}
		}
		x.Layers = list
		x.Window = min(x.Window, 20)
		for j := range x.Parts {
			p := &x.Parts[j]
			p.Bytes = min(p.Bytes, 24)
			p.Units = min(p.Units, 64)
		}
	}
	return spec
}

// stages are pipeline stages of some layers, cut unevenly.
func stages(t testing.TB, spec layout.Spec, p layout.Placement, cuts ...int) (all []*layout.Side) {
	t.Helper()
	for i := range len(cuts) - 1 {
		p.Layers = [2]int{cuts[i], cuts[i+1]}
		all = append(all, sidesOf(t, spec, p)...)
	}
	return all
}

// groupCases are pairs of layouts that differ.
func groupCases(t testing.TB) map[string][2][]*layout.Side {
	at := func(tp, block int, o layout.Order) layout.Placement {
		return layout.Placement{TP: tp, BlockTokens: block, Order: o, Ring: block == 6}
	}
	nhd, hnd := layout.VLLMNHD, layout.VLLMFusedHND
	pair := func(s layout.Spec, from, to layout.Placement) [2][]*layout.Side {
		return [2][]*layout.Side{sidesOf(t, s, from), sidesOf(t, s, to)}
	}
	latent := layout.Spec{Name: "mla", Tensors: []layout.Tensors{{Layers: []int{0, 1, 2},
		Parts: []layout.Cells{{Name: "latent", DType: "bf16", Units: 1, Bytes: 36}}}}}
	mixed := grouped(9, 4, 8)
	return map[string][2][]*layout.Side{
		"TP4 to TP8, 4 heads": pair(grouped(2, 4, 16), at(4, 4, nhd), at(8, 6, hnd)),
		"TP4 to TP8, 8 heads": pair(grouped(2, 8, 16), at(4, 4, nhd), at(8, 4, nhd)),
		"TP8 to TP4":          pair(grouped(2, 8, 16), at(8, 6, nhd), at(4, 4, nhd)),
		"MLA TP8 to TP1":      pair(latent, at(8, 4, nhd), at(1, 6, nhd)),
		"MLA TP1 to TP4":      pair(latent, at(1, 4, nhd), at(4, 6, nhd)),
		"PP3 to PP2": {stages(t, mixed, at(2, 4, nhd), 0, 2, 3, 9),
			stages(t, mixed, at(1, 6, hnd), 0, 5, 9)},
		"gpt-oss":       pair(scaled(t, "gpt-oss-120b", 4), at(2, 4, nhd), at(4, 6, hnd)),
		"qwen3-next":    pair(scaled(t, "qwen3-next-80b", 4), at(4, 4, nhd), at(2, 6, nhd)),
		"deepseek-v3.2": pair(scaled(t, "deepseek-v3.2", 2), at(4, 4, nhd), at(2, 6, nhd)),
	}
}

// TestGroupLayouts hands requests over between unequal groups, with digests, and checks every byte.
func TestGroupLayouts(t *testing.T) {
	for name, sides := range groupCases(t) {
		t.Run(name, func(t *testing.T) {
			overAll(t, func(t *testing.T, open func(testing.TB) driver.Backend) {
				c := newCrowd(t, crowdSetup{backend: open, from: sides[0], to: sides[1],
					config: func(_ bool, g *GroupConfig) { g.Digest = all }})
				for _, s := range []layout.Span{{From: 0, To: 40}, {From: 7, To: 33},
					{From: 11, To: 12}, {From: 5, To: 5}} {
					c.handOver(t, s).give()
				}
			})
		})
	}
}

// TestGroupPull sets the operations of edges by hand: reads, and reads beside writes, both with
// digests; and writes. Where all are writes, tails are filled by transfers, as in memory that the
// program cannot reach.
func TestGroupPull(t *testing.T) {
	for name, pulls := range map[string]func(e *layout.Edge) bool{
		"all":   func(*layout.Edge) bool { return true },
		"mixed": func(e *layout.Edge) bool { return (e.From+e.To)%2 == 0 },
		"none":  func(*layout.Edge) bool { return false },
	} {
		writes := name == "none"
		config := func(_ bool, g *GroupConfig) {
			if !writes {
				g.Digest = func(l int) bool { return l%2 == 0 }
			}
			g.Edge = func(e *layout.Edge) {
				if e.Op = engine.Write; pulls(e) {
					e.Op = engine.Read
				}
			}
		}
		t.Run(name, func(t *testing.T) {
			overAll(t, func(t *testing.T, open func(testing.TB) driver.Backend) {
				for _, layouts := range []string{"TP4 to TP8, 8 heads", "PP3 to PP2", "qwen3-next",
					"gpt-oss", "deepseek-v3.2"} {
					sides := groupCases(t)[layouts]
					c := newCrowd(t, crowdSetup{backend: open, from: sides[0], to: sides[1],
						config: config})
					for _, m := range c.to {
						if writes {
							clear(m.receive.memory)
							require.NoError(t, m.receive.prepareZeros())
						}
					}
					for range 2 {
						c.handOver(t, layout.Span{From: 3, To: 41}).give()
					}
				}
			})
		})
	}
}

// TestGroupReplicas: ranks that send no byte are released like the others, and not before all
// receivers have what they get.
func TestGroupReplicas(t *testing.T) {
	sides := groupCases(t)["MLA TP8 to TP1"]
	c := newCrowd(t, crowdSetup{from: sides[0], to: sides[1]})
	idle := 0
	for _, m := range c.from {
		if m.sender.edges[0] == nil {
			idle++
		}
	}
	require.Equal(t, 5, idle, "ranks without a byte to send: each layer has one of 8 senders")
	j := c.newJob(t, layout.Span{To: 40})
	j.begin(t)
	done := make(chan error, len(c.from))
	last, held := -1, -1
	for i, p := range j.pushes {
		if m := c.from[i]; m.sender.edges[0] != nil {
			last, held = i, m.sender.edges[0].Layers[0]
			continue
		}
		go func() { done <- p.Finish(within(t)) }()
	}
	for i, p := range j.pushes {
		for _, l := range layersOf(c.from[i].side) {
			if i != last || l != held {
				require.NoError(t, p.Layer(within(t), l))
			}
		}
		if i != last && c.from[i].sender.edges[0] != nil {
			go func() { done <- p.Finish(within(t)) }()
		}
	}
	require.Empty(t, done)
	require.NoError(t, j.pushes[last].Layer(within(t), held))
	require.NoError(t, j.pushes[last].Finish(within(t)))
	for range len(c.from) - 1 {
		require.NoError(t, <-done)
	}
	j.check(t)
}

// TestGroupRequestBytesOfLlama70B: all 80 layers of a prompt of 8,192 tokens, in pools of which it
// has a quarter, begin with at most 16 KiB on each edge.
func TestGroupRequestBytesOfLlama70B(t *testing.T) {
	spec, err := layout.LookupSpec("llama3.1-70b")
	require.NoError(t, err)
	side := func(tp, block int, o layout.Order) []*layout.Side {
		return sidesOf(t, spec, layout.Placement{TP: tp, BlockTokens: block, Order: o,
			Blocks: uint32(4 * 8192 / block)})
	}
	for name, to := range map[string][]*layout.Side{
		"to NHD, blocks of 16": side(4, 16, layout.VLLMNHD),
		"to HND, blocks of 64": side(4, 64, layout.VLLMHND),
	} {
		for _, op := range []engine.Op{engine.Write, engine.Read} {
			c := newCrowd(t, crowdSetup{from: side(8, 16, layout.VLLMNHD), to: to, unfilled: true,
				config: func(_ bool, g *GroupConfig) {
					g.Edge = func(e *layout.Edge) { e.Op = op }
				}})
			j := &job{c: c, number: 1, span: layout.Span{To: 8192}, pushes: make([]*GroupPush, 8),
				requests: make([]*GroupRequest, 4)}
			for _, m := range c.from {
				j.from = append(j.from, m.tables(t, j.span.To))
			}
			for _, m := range c.to {
				j.to = append(j.to, m.tables(t, j.span.To))
			}
			j.begin(t)
			most := 0
			for _, p := range j.pushes {
				mine := placesOf(p.tables, p.leases)
				for _, l := range p.links {
					if l.edge != nil {
						most = max(most, len(mine.append(nil)), len(l.grant.bytes))
					}
				}
			}
			t.Logf("%s, %v: at most %d bytes an edge", name, op, most)
			require.Less(t, most, 16<<10)
			require.Greater(t, most, 4*8192/64, "the block table is in it")
			require.NoError(t, j.pushes[0].Abort(within(t)))
			j.awaitEnd(t)
		}
	}
}

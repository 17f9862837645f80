// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"context"
	"fmt"
	"log"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/handoff"
	"github.com/sluicehq/sluice/kv/layout"
)

// member is one rank: mostly a process of its own, with backends that reach the other ones.
type member struct {
	eng     *engine.Engine
	mux     *handoff.Mux
	regions []*engine.Region
}

func must[T any](v T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return v
}

// newMember has an engine that knows the memory of a rank: the regions of its side, in their order.
func newMember(name string, side *layout.Side) *member {
	b := must(mem.New(mem.Config{})) // between processes: shm; between hosts: tcp or rdma
	m := &member{eng: must(engine.Open(engine.Config{Name: name,
		Backends: []engine.Backend{b}}))}
	m.mux = handoff.NewMux(m.eng)
	for _, area := range side.Regions { // a serving engine registers what it has
		memory := must(m.eng.Alloc(area.Bytes, engine.AllocOptions{Purpose: "kv"}))
		m.regions = append(m.regions, must(m.eng.Register(area.Name, memory.Segment())))
	}
	return m
}

// connect returns the peers of a rank: all of the other group, in their order.
func (m *member) connect(others []*member) (peers []*engine.Peer) {
	for _, o := range others { // Describe's bytes travel by any channel, as Side.Marshal's do
		peers = append(peers, must(m.eng.Connect(context.Background(), must(o.eng.Describe()))))
	}
	return peers
}

// Two prefill ranks, each with half of the heads, hand a request over to one decode rank, which has
// larger blocks and keeps heads outside tokens.
func ExampleGroupSender() {
	ctx := context.Background()
	spec := must(layout.LookupSpec("llama3.1-8b"))
	sides := func(group string, blocks uint32) []*layout.Side {
		g := must(layout.ParseGroup(group))
		g.Blocks = blocks
		return must(g.Sides(spec, 0))
	}
	plan := must(layout.NewPlan(sides("tp=2,layout=nhd,block=16", 8),
		sides("tp=1,layout=hnd,block=64", 2))) // once, on each rank

	prefill := []*member{newMember("prefill-0", plan.Senders()[0]),
		newMember("prefill-1", plan.Senders()[1])}
	decode := []*member{newMember("decode-0", plan.Receivers()[0])}
	receiver := must(handoff.NewGroupReceiver(decode[0].mux, handoff.GroupConfig{Plan: plan,
		Regions: decode[0].regions, Peers: decode[0].connect(prefill)}))
	var senders []*handoff.GroupSender
	for i, m := range prefill {
		senders = append(senders, must(handoff.NewGroupSender(m.mux, handoff.GroupConfig{
			Plan: plan, Index: i, Regions: m.regions, Peers: m.connect(decode)})))
	}

	// Request 7 has 100 tokens: the block tables are those of the engines.
	span := layout.Span{To: 100}
	request := must(receiver.Open(ctx, 7, layout.Tables{{1, 0}}, span))
	for _, s := range senders {
		go func() { // each in its own process
			push := must(s.Begin(ctx, 7, layout.Tables{{3, 1, 4, 0, 5, 2, 6}}, span))
			for layer := range 32 { // as they are computed
				if err := push.Layer(ctx, layer); err != nil {
					log.Fatal(err)
				}
			}
			if err := push.Finish(ctx); err != nil { // the blocks are free
				log.Fatal(err)
			}
		}()
	}
	layers := 0
	for range request.Ready() { // the decode may attend to that layer
		layers++
	}
	<-request.Done()
	fmt.Println(layers, "layers:", request.Err())
	// Output: 32 layers: <nil>
}

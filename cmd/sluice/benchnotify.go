// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/bench/pair"
	"github.com/sluicehq/sluice/engine"
)

const notifyBytes = 64

// measureMessages measures round trips, and with stamps one way before that.
func (f *benchFlags) measureMessages(ctx context.Context, bytes uint64, stamps bool) (
	[]bench.Result, error) {
	shape := bench.Shape{Op: engine.Write, Size: bytes, Batch: 1, Threads: 1}
	l, closeLink, err := f.dial(ctx, []bench.Shape{shape})
	if err != nil {
		return nil, err
	}
	defer closeLink()
	ctx, unwatch := l.Watch(ctx)
	defer unwatch()
	m := pair.NewMessages(bytes, stamps, f.pingRivals(bytes))
	rounds := f.rounds
	if rounds == 0 {
		rounds = pair.Rounds(f.seconds)
	}
	if err := m.Measure(ctx, l.Pair, rounds); err != nil {
		return nil, l.Explain(ctx, err)
	}
	name := f.backend
	if x, err := l.Engine.Explain(l.Peer, l.Local, l.Remote); name == auto && err == nil {
		name = x.Chosen
	}
	list := m.Results(name)
	for i := range list {
		list[i].Memory = l.Memory
	}
	return list, nil
}

// pingRivals are the programs beside round trips.
func (f *benchFlags) pingRivals(bytes uint64) []bench.Rival {
	if !f.beside() {
		return nil
	}
	return []bench.Rival{bench.PerfLatency(f.perf(), "ucp_am_lat", bytes),
		bench.PerfLatency(f.perf(), "ucp_put_lat", bytes)}
}

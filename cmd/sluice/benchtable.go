// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/engine"
)

// lane is a set of transports that the table measures.
type lane struct{ name, transports, devices string }

// The lanes of a host: memory that both ends map, and a socket.
var (
	memoryLane = lane{"shm", "posix,sysv,cma,self", ""}
	socketLane = lane{"tcp", "tcp", "lo"}
)

// The shapes of the table.
const (
	tableBytesMin  = 64 << 10
	tableBytesMax  = 16 << 20
	tableWindow    = 32       // messages under way at most, as ucx_perftest has it
	tableInFlight  = 16 << 20 // bytes of a batch at most
	tableEntry     = 656
	tableEntries   = 2048
	tablePing      = 8
	tableRegions   = 10000
	tableDescribed = 2048
)

// lanes are what the table goes through. Backends that have no transports stand beside
// UCX over memory.
func (f *benchFlags) lanes() []lane {
	switch {
	case f.network.ucx.transports != "" || f.network.ucx.devices != "":
		return []lane{{"", f.network.ucx.transports, f.network.ucx.devices}}
	case f.backend == ucxName:
		return []lane{memoryLane, socketLane}
	}
	return []lane{memoryLane}
}

// tableShapes are large pieces at one place, as ucx_perftest has them, and small ones
// scattered: over memory larger than the caches, and over as little as they need.
func tableShapes(spread uint64) []bench.Shape {
	var list []bench.Shape
	for size := uint64(tableBytesMin); size <= tableBytesMax; size *= 4 {
		for _, op := range []engine.Op{engine.Write, engine.Read} {
			batch := int(min(max(tableInFlight/size, 1), tableWindow))
			list = append(list, bench.Shape{Op: op, Size: size, Batch: batch, Threads: 1,
				Hot: true})
		}
	}
	for _, spread := range []uint64{spread, 2 * tableEntry * tableEntries} {
		list = append(list, bench.Shape{Op: engine.Write, Size: tableEntry, Batch: tableEntries,
			Pages: true, Spread: spread, Threads: 1})
	}
	return list
}

// measureTable is the comparison with UCX: transfers over each lane beside
// ucx_perftest and the bare loop, round trips of a message, and what
// registering and describing takes.
func (f *benchFlags) measureTable(ctx context.Context, newBar func() *progress) ([]bench.Result,
	error) {
	if f.backend == rdmaName {
		return f.measureVerbsTable(ctx, newBar)
	}
	var all []bench.Result
	for _, lane := range f.lanes() {
		g := *f
		g.perftest = nil
		g.network.ucx.transports, g.network.ucx.devices = lane.transports, lane.devices
		bar := newBar()
		results, err := g.measureLane(ctx, bar)
		bar.clear()
		for j := range results {
			results[j].Lane = lane.name
		}
		all = append(all, results...)
		if err != nil {
			return all, fmt.Errorf("lane %s: %w", lane.name, err)
		}
	}
	return all, nil
}

func (f *benchFlags) measureLane(ctx context.Context, bar *progress) ([]bench.Result, error) {
	shapes, err := f.shapes()
	if err != nil {
		return nil, err
	}
	results, err := f.measure(ctx, shapes, bar)
	if err != nil {
		return results, err
	}
	ping, err := f.measureMessages(ctx, tablePing, false)
	results = append(results, ping...)
	if err != nil {
		return results, err
	}
	regions, err := f.measureRegions()
	return append(results, regions...), err
}

// measureRegions needs no peer.
func (f *benchFlags) measureRegions() ([]bench.Result, error) {
	list, err := f.openSameHost()
	if err != nil {
		return nil, err
	}
	eng, err := engine.Open(engine.Config{Name: "regions", Backends: list})
	if err != nil {
		return nil, err
	}
	defer eng.Close()
	return bench.Regions(eng, f.backend, tableRegions, tableDescribed)
}

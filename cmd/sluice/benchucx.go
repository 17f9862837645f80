// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/sluicehq/sluice/bench"
)

// What stands beside the ucx backend: ucx_perftest of the same libucx, and a bare loop
// over ucp_put_nbx between the same two processes (package pair).

// beside says whether UCX's own figures stand beside ours.
func (f *benchFlags) beside() bool {
	return f.backend == ucxName || f.table && f.backend != rdmaName
}

// rivals are the programs beside a shape.
func (f *benchFlags) rivals(s bench.Shape, l *benchLink) []bench.Rival {
	if f.backend == rdmaName {
		return f.verbsRivals(s, l)
	}
	if !f.beside() || f.inProcess() {
		return nil
	}
	return []bench.Rival{bench.PerfRival(f.perf(), s)}
}

// perf is ucx_perftest over the same transports. It is kept, with what it knows of how
// many messages take a second.
func (f *benchFlags) perf() *bench.PerfTest {
	if f.perftest == nil {
		each := f.time() / bench.Blocks
		f.perftest = &bench.PerfTest{Transports: f.network.ucx.transports,
			Devices: f.network.ucx.devices, Time: min(each, time.Second)}
	}
	return f.perftest
}

// hotNote is said where shapes are compared that are not alike.
func hotNote(s *bench.Shape) string {
	const what = bench.PerfName + " moves one buffer again and again, which stays in the caches: "
	if s.Pages {
		return what + bench.LoopName + " goes through the same memory as we"
	}
	return what + "--hot does so, too"
}

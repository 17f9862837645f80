// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/internal/procs"
)

// What stands beside the ucx backend: ucx_perftest of the same libucx, and a bare loop
// over ucp_put_nbx between the same two processes.

// The messages of the bare loop.
const (
	kindLoopOpen = "loop-open" // to the target: loopConfig; answered by loopReady
	kindLoopSpin = "loop-spin" // to the target: whether to move its end; answered by "spun"
)

type loopConfig struct {
	Transports string `json:"transports"`
	Devices    string `json:"devices"`
	Bytes      uint64 `json:"bytes"`
}

type loopReady struct {
	Offer   bench.LoopOffer `json:"offer"`
	Missing string          `json:"missing"` // why there is no loop
}

// beside says whether UCX's own figures stand beside ours.
func (f *benchFlags) beside() bool { return f.backend == ucxName || f.table && f.backend != rdmaName }

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
		f.perftest = &bench.PerfTest{Transports: f.network.ucx.transports, Devices: f.network.ucx.devices, Time: min(each, time.Second)}
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

// openLoop adds the bare loop to a link. Where there is none, the note says why.
func (l *benchLink) openLoop(ctx context.Context, u *ucxFlags, compact, scattered uint64) (note string, err error) {
	if err := l.target.Send(kindLoopOpen, loopConfig{u.transports, u.devices, scattered}); err != nil {
		return "", err
	}
	var ready loopReady
	if err := await(ctx, l.target, "loop", &ready); err != nil {
		return "", err
	}
	if ready.Missing != "" {
		return ready.Missing, nil
	}
	end, err := bench.OpenLoop(u.transports, u.devices, compact)
	if err != nil {
		return err.Error(), nil
	}
	if err := end.Connect(ready.Offer, l.spin); err != nil {
		return err.Error(), errors.Join(end.Close())
	}
	l.Loop = end
	return "", nil
}

// spin has the target move its end of the loop, or leave it. It is called on the way
// out as well, when the run's context has ended.
func (l *benchLink) spin(on bool) error {
	if l.silent || l.target.Silent() > 4*procs.AliveEvery {
		return l.silence()
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), stopGrace, fmt.Errorf("no answer within %v", stopGrace))
	defer cancel()
	if err := l.target.Send(kindLoopSpin, on); err != nil {
		return err
	}
	return await(ctx, l.target, "spun", nil)
}

// serveLoop does what the parent says about the bare loop.
func (t *target) serveLoop(c *procs.Control, m *procs.Message) error {
	if m.Kind == kindLoopSpin {
		var on bool
		if err := m.Decode(&on); err != nil {
			return err
		}
		if t.loop != nil {
			t.loop.Spin(on)
		}
		return c.Send("spun", nil)
	}
	var cfg loopConfig
	if err := m.Decode(&cfg); err != nil {
		return err
	}
	var ready loopReady
	loop, err := bench.OpenLoop(cfg.Transports, cfg.Devices, cfg.Bytes)
	if err == nil {
		t.loop = loop
		ready.Offer, err = loop.Offer()
	}
	if err != nil {
		ready.Missing = err.Error()
	}
	return c.Send("loop", ready)
}

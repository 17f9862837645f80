// SPDX-License-Identifier: Apache-2.0

package pair

import (
	"context"
	"errors"
	"fmt"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/internal/procs"
)

// The messages of the bare loop.
const (
	kindLoopOpen = "loop-open" // to the target: LoopConfig; answered by loopReady
	kindLoopSpin = "loop-spin" // to the target: whether to move its end; answered by "spun"
)

// LoopConfig says how the bare loop over ucp_put_nbx, between the same two processes, is opened.
type LoopConfig struct {
	Transports string `json:"transports"`
	Devices    string `json:"devices"`
	Bytes      uint64 `json:"bytes"` // of the target's end; set by Open
}

type loopReady struct {
	Offer   bench.LoopOffer `json:"offer"`
	Missing string          `json:"missing"` // why there is no loop
}

// openLoop adds the bare loop to a link. Where there is none, the note says why.
func (p *Pair) openLoop(ctx context.Context, c *LoopConfig, compact, scattered uint64) (note string,
	err error) {
	if err := p.target.Send(kindLoopOpen, LoopConfig{c.Transports, c.Devices,
		scattered}); err != nil {
		return "", err
	}
	var ready loopReady
	if err := await(ctx, p.target, "loop", &ready); err != nil {
		return "", err
	}
	if ready.Missing != "" {
		return ready.Missing, nil
	}
	end, err := bench.OpenLoop(c.Transports, c.Devices, compact)
	if err != nil {
		return err.Error(), nil
	}
	if err := end.Connect(ready.Offer, p.spin); err != nil {
		return err.Error(), errors.Join(end.Close())
	}
	p.Loop = end
	return "", nil
}

// spin has the target move its end of the loop, or leave it. It is called on the way
// out as well, when the run's context has ended.
func (p *Pair) spin(on bool) error {
	if p.silent || p.target.Silent() > 4*procs.AliveEvery {
		return p.silence()
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), stopGrace,
		fmt.Errorf("no answer within %v", stopGrace))
	defer cancel()
	if err := p.target.Send(kindLoopSpin, on); err != nil {
		return err
	}
	return await(ctx, p.target, "spun", nil)
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
	var cfg LoopConfig
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

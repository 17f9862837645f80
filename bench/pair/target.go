// SPDX-License-Identifier: Apache-2.0

package pair

import (
	"context"
	"fmt"
	"net"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/procs"
)

// target is the other end of a measurement.
type target struct {
	socket net.Conn // for the baseline
	side   *bench.Side
	peers  <-chan *engine.Peer
	link   *bench.Link // made when first needed
	only   string
	loop   *bench.LoopEnd // the passive end of a baseline; nil: there is none
}

func (t *target) close() {
	if t.loop != nil {
		t.loop.Close()
	}
}

// Target is the passive process: it offers memory, and takes part in measurements when told to.
func Target(c *procs.Control, open OpenFunc) error {
	var cfg targetConfig
	if err := c.Expect("config", &cfg); err != nil {
		return err
	}
	conn, err := procs.Conn(c.Extra(0))
	if err != nil {
		return err
	}
	socket, err := procs.Conn(c.Extra(1))
	if err != nil {
		return err
	}
	list, err := open(cfg.Backend, cfg.Threads)
	if err != nil {
		return err
	}
	peers := make(chan *engine.Peer, 1)
	config := engineConfig("target", list)
	config.OnPeer = func(p *engine.Peer) { peers <- p }
	side, err := bench.OpenSide(config, cfg.Bytes, cfg.Memory)
	if err != nil {
		return err
	}
	defer side.Close()
	l := procs.NewSingle(conn)
	defer l.Close()
	go side.Engine.Serve(c.Context(), l)
	if err := c.Send("ready", targetReady{bench.AddressOf(side.Region.Bytes()),
		railPorts(list)}); err != nil {
		return err
	}
	t := &target{socket: socket, side: side, peers: peers, only: cfg.Only}
	defer t.close()
	return t.run(c)
}

// run does what the parent says until the control pipe closes.
func (t *target) run(c *procs.Control) error {
	for m := range c.Messages() {
		var err error
		var o order
		switch m.Kind {
		case kindLoopOpen, kindLoopSpin:
			err = t.serveLoop(c, &m)
		default:
			if err = m.Decode(&o); err == nil {
				err = t.serve(c, m.Kind, o)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (t *target) serve(c *procs.Control, kind string, o order) error {
	link, err := t.back(c.Context())
	if err != nil {
		return err
	}
	if kind == kindLanding {
		return bench.WritePong(c.Context(), *link, o.Bytes, o.Count, func() error {
			return c.Send("begun", nil)
		})
	}
	if err := c.Send("begun", nil); err != nil {
		return err
	}
	var s *bench.Samples
	switch kind {
	case kindPong:
		return bench.Pong(c.Context(), *link, o.Bytes, o.Count)
	case kindSocketPong:
		return bench.SocketPong(c.Context(), t.socket, o.Bytes, o.Count)
	case kindStamps:
		s, err = bench.ReceiveStamps(c.Context(), t.side.Engine, o.Count)
	case kindSocketStamps:
		s, err = bench.ReceiveSocketStamps(c.Context(), t.socket, o.Bytes, o.Count)
	default:
		err = fmt.Errorf("unknown measurement %q", kind)
	}
	if err != nil {
		return err
	}
	return c.Send("samples", s.All())
}

// back is the link to the initiator's memory.
func (t *target) back(ctx context.Context) (*bench.Link, error) {
	if t.link != nil {
		return t.link, nil
	}
	select {
	case p := <-t.peers:
		remote, err := p.Remote(bench.RegionName)
		if err != nil {
			return nil, err
		}
		t.link = &bench.Link{Engine: t.side.Engine, Peer: p, Local: t.side.Region, Remote: remote,
			Only: t.only}
		return t.link, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

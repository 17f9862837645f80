// SPDX-License-Identifier: Apache-2.0

// Package pair has two processes of one host measure together: the one that measures, and a
// target that it starts, which offers memory and takes part in messages (Target).
package pair

import (
	"context"
	"errors"
	"net"
	"os"
	"time"

	"github.com/sluicehq/sluice/backends/rdma"
	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/procs"
)

// OpenFunc opens the backends that a name stands for.
type OpenFunc func(backend string, threads int) ([]driver.Backend, error)

// Config says what the two ends are.
type Config struct {
	Backend       string
	Only          string // engine.Route.Only
	Threads       int    // that copy
	Memory        bench.Memory
	Local, Remote uint64 // bytes of the ends

	Open OpenFunc // of this end
	// Start starts a process that runs Target, with these files.
	Start func(files ...*os.File) (*procs.Child, error)
	Loop  *LoopConfig // the bare loop over UCX that stands beside; nil: none
}

// Pair is a link and the process at its other end. A Pair with a Link alone has no other
// process.
type Pair struct {
	bench.Link
	Notes        []string   // what does not stand beside, and why
	Ours, Theirs []RailPort // of backend rdma

	side   *bench.Side
	target *procs.Child // nil: there is no other process
	socket net.Conn     // to the target, for a baseline
	silent bool         // the target does not answer: nothing more is asked of it
	rails  func() []rdma.Rail
}

// targetConfig is what the parent tells the target process.
type targetConfig struct {
	Backend string       `json:"backend"`
	Only    string       `json:"only"`
	Threads int          `json:"threads"`
	Bytes   uint64       `json:"bytes"`
	Memory  bench.Memory `json:"memory"`
}

// targetReady is the answer.
type targetReady struct {
	Address uint64     `json:"address"` // of its memory
	Rails   []RailPort `json:"rails"`
}

// startLimit bounds each wait between the processes, and the silence of one that starts and is
// not stopped. How long the kernel takes to fault its memory in is no sign of anything: it says
// that it lives.
const startLimit = 60 * time.Second

// stopGrace is how long a process may take to close its engine.
const stopGrace = 5 * time.Second

// Open starts the target process and connects to it.
func Open(ctx context.Context, c Config) (*Pair, error) {
	p := &Pair{}
	conn, err := p.start(c.Start)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	ctx, unwatch := p.watchFor(ctx, startLimit)
	defer unwatch()
	if err := p.connect(ctx, &c, conn); err != nil {
		err = p.Explain(ctx, err)
		p.Close()
		return nil, err
	}
	return p, nil
}

// Close ends the target process.
func (p *Pair) Close() {
	if p.grace() == 0 {
		p.target.Stop(0) // first: our engine would wait for it
	}
	if p.Loop != nil {
		p.Loop.Close()
	}
	p.socket.Close()
	if p.side != nil {
		p.side.Close()
	}
	p.target.Stop(p.grace())
}

// start starts the target process. What it returns connects the engines.
func (p *Pair) start(start func(files ...*os.File) (*procs.Child, error)) (net.Conn, error) {
	var conns [2]net.Conn
	var theirs [2]*os.File
	var err error
	for i := range conns {
		if conns[i], theirs[i], err = inheritable(); err != nil {
			return nil, err
		}
		defer theirs[i].Close()
	}
	p.socket = conns[1]
	if p.target, err = start(theirs[:]...); err != nil {
		return nil, errors.Join(err, conns[0].Close(), conns[1].Close())
	}
	return conns[0], nil
}

// inheritable makes a connection between this process and one to be started.
func inheritable() (net.Conn, *os.File, error) {
	mine, theirs, err := procs.Pair()
	if err != nil {
		return nil, nil, err
	}
	conn, err := procs.Conn(mine)
	if err != nil {
		return nil, nil, errors.Join(err, theirs.Close())
	}
	return conn, theirs, nil
}

// connect opens this side and dials the other one once that is ready.
func (p *Pair) connect(ctx context.Context, c *Config, conn net.Conn) error {
	if err := p.target.Send("config", targetConfig{c.Backend, c.Only, c.Threads, c.Remote,
		c.Memory}); err != nil {
		return err
	}
	var ready targetReady
	if err := await(ctx, p.target, "ready", &ready); err != nil {
		return err
	}
	list, err := c.Open(c.Backend, c.Threads)
	if err != nil {
		return err
	}
	p.rails, p.Ours, p.Theirs = railsOf(list), railPorts(list), ready.Rails
	if p.side, err = openSide(ctx, engineConfig("initiator", list), c.Local, c.Memory); err != nil {
		return err
	}
	p.Link = bench.Link{Engine: p.side.Engine, Local: p.side.Region, Only: c.Only,
		Memory:  p.side.From(),
		Process: p.target.PID, Address: ready.Address}
	ctx, unwatch := p.Watch(ctx) // a target that has been ready gives signs of life
	defer unwatch()
	if p.Peer, err = p.side.Engine.DialConn(ctx, conn); err != nil {
		return err
	}
	if p.Remote, err = p.Peer.Remote(bench.RegionName); err != nil || c.Loop == nil {
		return err
	}
	note, err := p.openLoop(ctx, c.Loop, c.Local, c.Remote)
	if note != "" {
		p.Notes = append(p.Notes, bench.LoopName+" was not measured: "+note)
	}
	return err
}

// openSide returns without the side when ctx ends while the kernel faults its memory in. The
// process is about to end then.
func openSide(ctx context.Context, cfg engine.Config, n uint64, m bench.Memory) (*bench.Side,
	error) {
	type result struct {
		side *bench.Side
		err  error
	}
	ended := make(chan result, 1)
	go func() {
		s, err := bench.OpenSide(cfg, n, m)
		ended <- result{s, err}
	}()
	select {
	case r := <-ended:
		return r.side, r.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// engineConfig is that of one end. What it waits for is the other process, which may be
// starting on a machine that is slow.
func engineConfig(name string, list []driver.Backend) engine.Config {
	return engine.Config{Name: name, Backends: list, HandshakeTimeout: startLimit,
		ConnectTimeout: startLimit, TransferTimeout: startLimit}
}

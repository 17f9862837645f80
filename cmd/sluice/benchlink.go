// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/sluicehq/sluice/backends/rdma"
	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/procs"
)

// benchConfig is what the parent tells the target process.
type benchConfig struct {
	Backend string       `json:"backend"`
	Threads int          `json:"threads"`
	Bytes   uint64       `json:"bytes"`
	Memory  bench.Memory `json:"memory"`
}

// benchReady is the answer.
type benchReady struct {
	Address uint64     `json:"address"` // of its memory
	Rails   []railPort `json:"rails"`   // of backend rdma
}

// benchLink is a link and the process at its other end.
type benchLink struct {
	bench.Link
	side   *bench.Side
	target *procs.Child // nil: there is no other process
	socket net.Conn     // to the target, for a baseline
	notes  []string     // what does not stand beside, and why
	silent bool         // the target does not answer: nothing more is asked of it

	rails        func() []rdma.Rail // of this side; nil: another backend
	ours, theirs []railPort
	single       *benchLink // the same with one entry in each request; made when first needed
}

// explain prefers the death of the target, or its silence, to their consequences. What
// the target says itself needs no explanation.
func (l *benchLink) explain(ctx context.Context, err error) error {
	var said *saidError
	if l.target == nil || errors.As(err, &said) {
		return err
	}
	if ctx.Err() != nil {
		if cause := context.Cause(ctx); errors.Is(cause, errSilent) && !errors.Is(err, errSilent) {
			return fmt.Errorf("%w (then: %w)", cause, err) // the watch ended it
		}
		return err
	}
	tick := time.NewTicker(procs.AliveEvery / 20)
	defer tick.Stop()
	for failed := time.Now(); ; {
		select {
		case <-l.target.Exited():
			death := l.target.ExitError()
			if death == nil || death.Error() == err.Error() {
				return err
			}
			return fmt.Errorf("%w (then: %w)", death, err)
		case <-tick.C:
		}
		switch silent, since := l.target.Silent(), time.Since(failed); {
		case silent > 4*procs.AliveEvery:
			l.silent = true
			if errors.Is(err, errSilent) {
				return err
			}
			return fmt.Errorf("%w (then: %w)", l.silence(), err)
		case silent < since && since > 200*time.Millisecond:
			return err // it lives
		}
	}
}

// startLimit bounds each wait between the processes, and the silence of one that starts. How
// long the kernel takes to fault its memory in is no sign of anything: it says that it lives.
const startLimit = 60 * time.Second

// stopGrace is how long a process may take to close its engine.
const stopGrace = 5 * time.Second

// dial starts the target process and connects to it.
func (f *benchFlags) dial(ctx context.Context, shapes []bench.Shape) (*benchLink, func(), error) {
	l := &benchLink{}
	conn, err := l.start(f.network.args(f.backend))
	if err != nil {
		return nil, nil, err
	}
	defer conn.Close()
	ctx, unwatch := l.watchFor(ctx, startLimit)
	defer unwatch()
	if err := f.connect(ctx, l, conn, shapes); err != nil {
		err = l.explain(ctx, err)
		l.close()
		return nil, nil, err
	}
	return l, l.close, nil
}

func (l *benchLink) close() {
	if l.Loop != nil {
		l.Loop.Close()
	}
	if l.single != nil {
		l.single.close()
	}
	l.socket.Close()
	if l.side != nil {
		l.side.Close()
	}
	l.target.Stop(l.grace())
}

// start starts the target process. What it returns connects the engines.
func (l *benchLink) start(flags []string) (net.Conn, error) {
	var conns [2]net.Conn
	var theirs [2]*os.File
	var err error
	for i := range conns {
		if conns[i], theirs[i], err = inheritable(); err != nil {
			return nil, err
		}
		defer theirs[i].Close()
	}
	l.socket = conns[1]
	args := append([]string{"peer", "bench-target"}, flags...)
	if l.target, err = procs.Start("target", args, theirs[:]...); err != nil {
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
func (f *benchFlags) connect(ctx context.Context, l *benchLink, conn net.Conn, shapes []bench.Shape) error {
	local, remote := largest(shapes)
	if err := l.target.Send("config", benchConfig{f.backend, f.threads, remote, bench.Memory(f.memory)}); err != nil {
		return err
	}
	var ready benchReady
	if err := await(ctx, l.target, "ready", &ready); err != nil {
		return err
	}
	list, err := f.openSameHost()
	if err != nil {
		return err
	}
	l.rails, l.ours, l.theirs = railsOf(list), railPorts(list), ready.Rails
	l.side, err = interruptible(ctx, func() (*bench.Side, error) {
		return bench.OpenSide(benchEngine("initiator", list), local, bench.Memory(f.memory))
	})
	if err != nil {
		return err
	}
	l.Link = bench.Link{Engine: l.side.Engine, Local: l.side.Region, Only: only(f.backend), Memory: l.side.From(),
		Process: l.target.PID, Address: ready.Address}
	if l.Peer, err = l.side.Engine.DialConn(ctx, conn); err != nil {
		return err
	}
	if l.Remote, err = l.Peer.Remote(bench.RegionName); err != nil || !f.beside() || f.notify {
		return err
	}
	note, err := l.openLoop(ctx, &f.network.ucx, local, remote)
	if note != "" {
		l.notes = append(l.notes, bench.LoopName+" was not measured: "+note)
	}
	return err
}

// benchEngine is that of one end. What it waits for is the other process, which may be
// starting on a machine that is slow.
func benchEngine(name string, list []driver.Backend) engine.Config {
	return engine.Config{Name: name, Backends: list, HandshakeTimeout: startLimit, ConnectTimeout: startLimit, TransferTimeout: startLimit}
}

// openSameHost opens what the command line asks for, for a peer in another process.
func (f *benchFlags) openSameHost() ([]driver.Backend, error) {
	return openBackends(f.backend, driver.SameHost, f.openOptions())
}

// benchTarget is the passive process: it offers memory, and answers
// notifications when told to.
func benchTarget(c *procs.Control, n networkFlags) error {
	var cfg benchConfig
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
	n.give(cfg.Backend)
	list, err := openBackends(cfg.Backend, driver.SameHost, openOptions{threads: cfg.Threads, ucx: n.ucx, rdma: n.rdma, tcp: n.tcp})
	if err != nil {
		return err
	}
	peers := make(chan *engine.Peer, 1)
	engineConfig := benchEngine("target", list)
	engineConfig.OnPeer = func(p *engine.Peer) { peers <- p }
	side, err := bench.OpenSide(engineConfig, cfg.Bytes, cfg.Memory)
	if err != nil {
		return err
	}
	defer side.Close()
	l := procs.NewSingle(conn)
	defer l.Close()
	go side.Engine.Serve(c.Context(), l)
	if err := c.Send("ready", benchReady{bench.AddressOf(side.Region.Bytes()), railPorts(list)}); err != nil {
		return err
	}
	t := &target{socket: socket, side: side, peers: peers, only: only(cfg.Backend)}
	defer t.close()
	return serveBench(c, t)
}

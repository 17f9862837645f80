// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"os"

	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/bench/pair"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/procs"
)

// benchLink is what the shapes of a command line are measured over.
type benchLink struct {
	*pair.Pair
	single *benchLink // the same with one entry in each request; made when first needed
}

func (l *benchLink) close() {
	if l.single != nil {
		l.single.close()
	}
	l.Pair.Close()
}

// dial starts the target process and connects to it.
func (f *benchFlags) dial(ctx context.Context, shapes []bench.Shape) (*benchLink, func(), error) {
	local, remote := largest(shapes)
	c := pair.Config{
		Backend: f.backend, Only: only(f.backend), Threads: f.threads,
		Memory: bench.Memory(f.memory), Local: local, Remote: remote,
		Open: func(string, int) ([]driver.Backend, error) { return f.openSameHost() },
		Start: func(files ...*os.File) (*procs.Child, error) {
			return procs.Start("target", append([]string{"peer", "bench-target"},
				f.network.args(f.backend)...), files...)
		},
	}
	if f.beside() && !f.notify {
		c.Loop = &pair.LoopConfig{Transports: f.network.ucx.transports,
			Devices: f.network.ucx.devices}
	}
	p, err := pair.Open(ctx, c)
	if err != nil {
		return nil, nil, err
	}
	if f.backend == tcpName {
		f.addSockets(p)
	}
	l := &benchLink{Pair: p}
	return l, l.close, nil
}

// addSockets has bare sockets stand beside tcp, over as many connections.
func (f *benchFlags) addSockets(p *pair.Pair) {
	if f.network.tcp.cert != "" {
		p.Notes = append(p.Notes, bench.SocketsName+" were not measured: they do not encrypt")
		return
	}
	p.Sockets = cmp.Or(f.network.tcp.conns, tcp.ConnsDefault)
}

// openSameHost opens what the command line asks for, for a peer in another process.
func (f *benchFlags) openSameHost() ([]driver.Backend, error) {
	return openBackends(f.backend, driver.SameHost, f.openOptions())
}

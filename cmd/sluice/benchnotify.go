// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/procs"
)

// How notifications are measured. The pause lets the receiver fall asleep: it is
// well over the spin of an engine.
const (
	notifyBytes = 64
	notifyPause = 300 * time.Microsecond
	notifyMax   = 1 << 16 // samples kept
)

// The measurements that the target takes part in.
const (
	kindStamps       = "stamps"
	kindPong         = "pong"
	kindLanding      = "landing"
	kindSocketStamps = "socket-stamps"
	kindSocketPong   = "socket-pong"
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

// order is a measurement that the target takes part in.
type order struct {
	Count int    `json:"count"`
	Bytes uint64 `json:"bytes"` // of a message
}

// serveBench does what the parent says until the control pipe closes.
func serveBench(c *procs.Control, t *target) error {
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
		return bench.WritePong(c.Context(), *link, o.Bytes, o.Count, func() error { return c.Send("begun", nil) })
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
		t.link = &bench.Link{Engine: t.side.Engine, Peer: p, Local: t.side.Region, Remote: remote, Only: t.only}
		return t.link, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// measureNotify measures one way to a parked goroutine, then round trips.
func (f *benchFlags) measureNotify(ctx context.Context) ([]bench.Result, error) {
	if f.inProcess() {
		return nil, usagef("--notify measures between two processes: backend %q stays within one", f.backend)
	}
	return f.measureMessages(ctx, notifyBytes, true)
}

// measureMessages measures round trips of small writes with a message behind each, and
// with stamps the way of one to a parked goroutine before that.
func (f *benchFlags) measureMessages(ctx context.Context, bytes uint64, stamps bool) ([]bench.Result, error) {
	shape := bench.Shape{Op: engine.Write, Size: bytes, Batch: 1, Threads: 1}
	l, closeLink, err := f.dial(ctx, []bench.Shape{shape})
	if err != nil {
		return nil, err
	}
	defer closeLink()
	ctx, unwatch := l.watch(ctx)
	defer unwatch()
	m := &messages{bytes: bytes, stamps: stamps, samples: map[string]*bench.Samples{}, rivals: bench.NewContest(f.pingRivals(bytes))}
	for _, kind := range []string{kindStamps, kindPong, kindSocketStamps, kindSocketPong} {
		m.samples[kind] = bench.NewSamples(notifyMax)
	}
	if err := m.measure(ctx, l, f.notifyRounds()); err != nil {
		return nil, l.explain(ctx, err)
	}
	name := f.backend
	if x, err := l.Engine.Explain(l.Peer, l.Local, l.Remote); name == auto && err == nil {
		name = x.Chosen
	}
	list := m.results(name)
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
	return []bench.Rival{bench.PerfLatency(f.perf(), "ucp_am_lat", bytes), bench.PerfLatency(f.perf(), "ucp_put_lat", bytes)}
}

// messages is a measurement of small messages.
type messages struct {
	bytes   uint64
	stamps  bool // also one way
	samples map[string]*bench.Samples
	rivals  *bench.Contest
}

// measure takes the rounds in blocks, and the rivals after each.
func (m *messages) measure(ctx context.Context, l *benchLink, rounds int) error {
	for n := range rounds {
		if err := l.round(ctx, m, n%2 == 1); err != nil {
			return err
		}
		if (n+1)*bench.Blocks/rounds == n*bench.Blocks/rounds {
			continue
		}
		if err := m.rivals.Measure(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (m *messages) results(name string) []bench.Result {
	var list []bench.Result
	if m.stamps {
		list = append(list, bench.NotifyResult(name, "notify", m.bytes, m.samples[kindStamps], m.samples[kindSocketStamps]))
	}
	ping := bench.NotifyResult(name, "pingpong", m.bytes, m.samples[kindPong], m.samples[kindSocketPong])
	beside, notes := m.rivals.Baselines()
	ping.SetBaselines(append(beside, ping.Baselines...))
	ping.Notes = notes
	return append(list, ping)
}

// A round is so many messages one way, and as many round trips, each by the
// engine and over the socket.
const notifyPerRound = 100

// notifyRounds is what fits the time: most of it goes into pauses.
func (f *benchFlags) notifyRounds() int {
	if f.rounds > 0 {
		return f.rounds
	}
	return max(int(f.seconds/(2*notifyPerRound*notifyPause.Seconds())), 1)
}

// round adds samples of all kinds; the socket goes first in every second one.
func (l *benchLink) round(ctx context.Context, m *messages, socketFirst bool) error {
	kinds := []string{kindStamps, kindSocketStamps, kindPong, kindSocketPong}
	if socketFirst {
		kinds = []string{kindSocketStamps, kindStamps, kindSocketPong, kindPong}
	}
	if !m.stamps {
		kinds = kinds[2:]
	}
	for _, kind := range kinds {
		s, err := l.sample(ctx, kind, m.bytes)
		if err != nil {
			return err
		}
		m.samples[kind].Merge(s)
	}
	return nil
}

// sample takes one kind of measurement.
func (l *benchLink) sample(ctx context.Context, kind string, bytes uint64) (s *bench.Samples, err error) {
	if err := l.begin(ctx, kind, order{notifyPerRound, bytes}); err != nil {
		return nil, err
	}
	switch kind {
	case kindPong:
		return bench.PingPong(ctx, l.Link, bytes, notifyPerRound)
	case kindSocketPong:
		return bench.SocketPingPong(ctx, l.socket, bytes, notifyPerRound)
	case kindStamps:
		err = bench.SendStamps(ctx, l.Link, bytes, notifyPerRound, notifyPause)
	default:
		err = bench.SendSocketStamps(ctx, l.socket, bytes, notifyPerRound, notifyPause)
	}
	if err != nil {
		return nil, err
	}
	return l.collect(ctx)
}

// collect gets what the target has measured.
func (l *benchLink) collect(ctx context.Context) (*bench.Samples, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, startLimit, fmt.Errorf("no result within %v", startLimit))
	defer cancel()
	var list []time.Duration
	if err := await(ctx, l.target, "samples", &list); err != nil {
		return nil, err
	}
	s := bench.NewSamples(len(list))
	for _, d := range list {
		s.Add(d)
	}
	return s, nil
}

func (l *benchLink) begin(ctx context.Context, kind string, o order) error {
	if err := l.target.Send(kind, o); err != nil {
		return err
	}
	return await(ctx, l.target, "begun", nil)
}

// SPDX-License-Identifier: Apache-2.0

package pair

import (
	"context"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/bench"
)

// How notifications are measured. The pause lets the receiver fall asleep: it is
// well over the spin of an engine.
const (
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

// order is a measurement that the target takes part in.
type order struct {
	Count int    `json:"count"`
	Bytes uint64 `json:"bytes"` // of a message
}

// Messages is a measurement of small messages.
type Messages struct {
	bytes   uint64
	stamps  bool // also one way
	samples map[string]*bench.Samples
	rivals  *bench.Contest
}

// NewMessages measures round trips of small writes with a message behind each, and with stamps
// the way of one to a parked goroutine before that.
func NewMessages(bytes uint64, stamps bool, rivals []bench.Rival) *Messages {
	m := &Messages{bytes: bytes, stamps: stamps, samples: map[string]*bench.Samples{},
		rivals: bench.NewContest(rivals)}
	for _, kind := range []string{kindStamps, kindPong, kindSocketStamps, kindSocketPong} {
		m.samples[kind] = bench.NewSamples(notifyMax)
	}
	return m
}

// Measure takes the rounds in blocks, and the rivals after each.
func (m *Messages) Measure(ctx context.Context, p *Pair, rounds int) error {
	for n := range rounds {
		if err := p.round(ctx, m, n%2 == 1); err != nil {
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

// Results are the ways of a message that a backend carries.
func (m *Messages) Results(name string) []bench.Result {
	var list []bench.Result
	if m.stamps {
		list = append(list, bench.NotifyResult(name, "notify", m.bytes, m.samples[kindStamps],
			m.samples[kindSocketStamps]))
	}
	ping := bench.NotifyResult(name, "pingpong", m.bytes, m.samples[kindPong],
		m.samples[kindSocketPong])
	beside, notes := m.rivals.Baselines()
	ping.SetBaselines(append(beside, ping.Baselines...))
	ping.Notes = notes
	return append(list, ping)
}

// A round is so many messages one way, and as many round trips, each by the
// engine and over the socket.
const notifyPerRound = 100

// Rounds is how many fit a time: most of it goes into pauses.
func Rounds(seconds float64) int {
	return max(int(seconds/(2*notifyPerRound*notifyPause.Seconds())), 1)
}

// round adds samples of all kinds; the socket goes first in every second one.
func (p *Pair) round(ctx context.Context, m *Messages, socketFirst bool) error {
	kinds := []string{kindStamps, kindSocketStamps, kindPong, kindSocketPong}
	if socketFirst {
		kinds = []string{kindSocketStamps, kindStamps, kindSocketPong, kindPong}
	}
	if !m.stamps {
		kinds = kinds[2:]
	}
	for _, kind := range kinds {
		s, err := p.sample(ctx, kind, m.bytes)
		if err != nil {
			return err
		}
		m.samples[kind].Merge(s)
	}
	return nil
}

// sample takes one kind of measurement.
func (p *Pair) sample(ctx context.Context, kind string, bytes uint64) (s *bench.Samples,
	err error) {
	if err := p.begin(ctx, kind, order{notifyPerRound, bytes}); err != nil {
		return nil, err
	}
	switch kind {
	case kindPong:
		return bench.PingPong(ctx, p.Link, bytes, notifyPerRound)
	case kindSocketPong:
		return bench.SocketPingPong(ctx, p.socket, bytes, notifyPerRound)
	case kindStamps:
		err = bench.SendStamps(ctx, p.Link, bytes, notifyPerRound, notifyPause)
	default:
		err = bench.SendSocketStamps(ctx, p.socket, bytes, notifyPerRound, notifyPause)
	}
	if err != nil {
		return nil, err
	}
	return p.collect(ctx)
}

// collect gets what the target has measured.
func (p *Pair) collect(ctx context.Context) (*bench.Samples, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, startLimit, fmt.Errorf("no result within %v",
		startLimit))
	defer cancel()
	var list []time.Duration
	if err := await(ctx, p.target, "samples", &list); err != nil {
		return nil, err
	}
	s := bench.NewSamples(len(list))
	for _, d := range list {
		s.Add(d)
	}
	return s, nil
}

func (p *Pair) begin(ctx context.Context, kind string, o order) error {
	if err := p.target.Send(kind, o); err != nil {
		return err
	}
	return await(ctx, p.target, "begun", nil)
}

// Landings measures writes of that many bytes that both ends see land in their memory, for a
// while.
func (p *Pair) Landings(ctx context.Context, bytes uint64, each time.Duration) (*bench.Samples,
	error) {
	all := bench.NewSamples(notifyMax)
	for begun := time.Now(); time.Since(begun) < each; {
		if err := p.begin(ctx, kindLanding, order{notifyPerRound, bytes}); err != nil {
			return nil, err
		}
		s, err := bench.WritePing(ctx, p.Link, bytes, notifyPerRound)
		if err != nil {
			return nil, err
		}
		all.Merge(s)
	}
	return all, nil
}

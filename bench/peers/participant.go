// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// Participant is an engine with settings, on one lane.
type Participant struct {
	Name      string // as tables have it
	Lane      Lane
	Command   []string // the driver
	Env       []string // NAME=VALUE, beside the environment
	Ours      bool     // it is sluice
	Yardstick bool     // a program that moves bytes and is no engine: no lists, no content, no processor times
}

// Where the drivers are: Bin are those in Go, Scripts those in Python, which run with Python.
type Where struct {
	Bin, Scripts string
	Python       func(peer string) string // the interpreter of a peer's environment
}

// Participants are all there are, those of one lane together. What cannot run says so itself.
func Participants(w Where) []Participant {
	var list []Participant
	own := func(lane Lane, names ...string) {
		for _, name := range names {
			list = append(list, Participant{Name: "sluice-" + name, Lane: lane, Ours: true,
				Command: []string{filepath.Join(w.Bin, "sluice"), name}})
		}
	}
	python := func(lane Lane, name, peer, script string, env []string, args ...string) {
		list = append(list, Participant{Name: name, Lane: lane, Env: env,
			Command: append([]string{w.Python(peer), filepath.Join(w.Scripts, script)}, args...)})
	}
	for _, lane := range []Lane{Host, TCP} {
		var env []string
		if lane == Host {
			own(lane, "shm", "foreign", "ucx")
		} else {
			own(lane, "tcp", "ucx-tcp")
			env = []string{"UCX_TLS=tcp", "UCX_NET_DEVICES=lo"}
		}
		python(lane, "nixl", "nixl", "nixl_agent.py", env)
		python(lane, "nixl-polled", "nixl", "nixl_agent.py", env, "polled")
		python(lane, "mooncake", "mooncake", "mooncake_engine.py", nil)
		list = append(list, Participant{Name: "ucx_perftest", Lane: lane, Yardstick: true,
			Command: []string{filepath.Join(w.Bin, "perftest")}})
	}
	return list
}

// The limits of one request: a driver that exceeds them hangs.
const (
	openLimit = 60 * time.Second // its memory faulted in, on a machine that is busy
	askLimit  = 30 * time.Second
	endGrace  = 3 * time.Second
)

// Pair are the two ends of a participant.
type Pair struct {
	Participant
	Version, Settings string
	Memory            uint64        // of each end
	Contact           time.Duration // from the target's card to the first bytes there

	target, initiator *Driver
	targetCard        string
	initiatorCard     string
	greedy            bool // it takes processors while nothing is asked of it
	idle              float64
}

// OpenPair starts both ends, connects them, and moves a first piece.
func OpenPair(ctx context.Context, p Participant, memory uint64) (_ *Pair, err error) {
	if _, err := os.Stat(p.Command[0]); err != nil {
		return nil, fmt.Errorf("%s is not there: %w: %w", p.Command[0], err, ErrUnsupported)
	}
	pair := &Pair{Participant: p, Memory: memory}
	defer func() {
		if err != nil {
			pair.Close()
		}
	}()
	for _, end := range []struct {
		role   string
		driver **Driver
		card   *string
	}{{RoleTarget, &pair.target, &pair.targetCard}, {RoleInitiator, &pair.initiator, &pair.initiatorCard}} {
		if *end.driver, err = StartDriver(p.Name+" "+end.role, p.Command, p.Env); err != nil {
			return nil, err
		}
		a, err := (*end.driver).Ask(ctx, Request{Do: DoOpen, Lane: string(p.Lane), Role: end.role, Name: end.role, Bytes: memory}, openLimit)
		if err != nil {
			return nil, err
		}
		*end.card, pair.Version, pair.Settings = a.Card, a.Version, a.Settings
	}
	return pair, pair.meet(ctx)
}

// meet measures the first contact. The target learns of the initiator afterwards, where it has need
// of that to answer messages.
func (p *Pair) meet(ctx context.Context) error {
	if err := p.serve(ctx, true); err != nil {
		return err
	}
	connected, err := p.initiator.Ask(ctx, Request{Do: DoConnect, Card: p.targetCard}, askLimit)
	if err != nil {
		return err
	}
	if !p.Yardstick {
		first, err := p.first(ctx)
		if err != nil {
			return err
		}
		p.Contact = time.Duration(connected.NS + first.NS)
	}
	if _, err := p.target.Ask(ctx, Request{Do: DoConnect, Card: p.initiatorCard}, askLimit); err != nil {
		return err
	}
	return p.serve(ctx, false)
}

// first moves one piece.
func (p *Pair) first(ctx context.Context) (Answer, error) {
	if _, err := p.ask(ctx, Request{Do: DoPrepare, Op: "write", Size: sizes[0], Local: [][]int32{{0}}, Remote: [][]int32{{0}}}); err != nil {
		return Answer{}, err
	}
	return p.ask(ctx, Request{Do: DoOnce})
}

// probe reports whether a pair that has failed can still move something.
func (p *Pair) probe(ctx context.Context) error {
	if p.Yardstick {
		return nil
	}
	if err := p.serve(ctx, true); err != nil {
		return err
	}
	_, err := p.first(ctx)
	return errors.Join(err, p.serve(ctx, false))
}

// ask asks the initiator.
func (p *Pair) ask(ctx context.Context, r Request) (Answer, error) {
	return p.initiator.Ask(ctx, r, askLimit+time.Duration(r.NS))
}

// serve tells the target that the initiator works now, or no longer.
func (p *Pair) serve(ctx context.Context, on bool) error {
	_, err := p.target.Ask(ctx, Request{Do: DoServe, On: on}, askLimit)
	return err
}

// CPU is what both ends have taken of processors so far.
func (p *Pair) CPU() time.Duration { return p.target.CPU() + p.initiator.CPU() }

// Rest stops a pair that would cost the others; Wake continues it.
func (p *Pair) Rest() {
	if p.greedy {
		p.target.Stop()
		p.initiator.Stop()
	}
}

// Wake continues a pair that Rest has stopped.
func (p *Pair) Wake() {
	p.target.Resume()
	p.initiator.Resume()
}

// Close ends both processes.
func (p *Pair) Close() {
	for _, d := range []*Driver{p.initiator, p.target} {
		if d != nil {
			d.Close(endGrace)
		}
	}
}

// greedyFrom is the share of one processor from which on a pair is stopped outside its turns.
const greedyFrom = 0.02

// Idle measures what the pair takes of processors while nothing is asked of it, in shares of one.
func (p *Pair) Idle(ctx context.Context, span time.Duration) (float64, error) {
	before, begin := p.CPU(), time.Now()
	select {
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	case <-time.After(span):
	}
	p.idle = float64(p.CPU()-before) / float64(time.Since(begin))
	p.greedy = p.idle > greedyFrom
	return p.idle, nil
}

// check has one operation move bytes that were not there before and compares both ends.
func (p *Pair) check(ctx context.Context, s *Shape, local, remote []int32, seed uint64) error {
	from, to := p.initiator, p.target
	slots := [][]int32{local, remote}
	if s.Op == "read" {
		from, to = to, from
		slots[0], slots[1] = slots[1], slots[0]
	}
	if _, err := from.Ask(ctx, Request{Do: DoStamp, Size: s.Size, Slots: slots[0], Seed: seed}, askLimit); err != nil {
		return err
	}
	if err := p.serve(ctx, true); err != nil {
		return err
	}
	_, err := p.ask(ctx, Request{Do: DoOnce})
	if err := errors.Join(err, p.serve(ctx, false)); err != nil {
		return err
	}
	var crc [2]uint32
	for i, d := range []*Driver{from, to} {
		a, err := d.Ask(ctx, Request{Do: DoDigest, Size: s.Size, Slots: slots[i]}, askLimit)
		if err != nil {
			return err
		}
		crc[i] = a.CRC
	}
	if crc[0] != crc[1] {
		return fmt.Errorf("%s: the bytes that arrived are not those that were sent: %w", s, ErrNonsense)
	}
	return nil
}

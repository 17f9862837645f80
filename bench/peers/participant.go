// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"
)

// Participant is an engine with settings, on one lane.
type Participant struct {
	Name     string // as tables have it
	Lane     Lane
	Command  []string // the driver
	Target   []string // the driver of the target, where it is another: of a file, what keeps it
	Env      []string // NAME=VALUE, beside the environment
	Ours     bool     // it is sluice
	Scripted bool     // its driver is no compiled program: calls into the library cost something
	// a program that moves bytes and is no engine: no lists, no content, no processor times
	Yardstick bool

	// Needs says why the participant cannot run on this machine, and what to do; nil: it can.
	Needs func() error
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
	if p.Needs != nil {
		if err := p.Needs(); err != nil {
			return nil, err
		}
	}
	if _, err := os.Stat(p.Command[0]); err != nil {
		return nil, fmt.Errorf("%s is not there: %w: %w", p.Command[0], err, ErrUnsupported)
	}
	pair := &Pair{Participant: p, Memory: memory}
	defer func() {
		if err != nil {
			pair.Close()
		}
	}()
	target := p.Command
	if p.Target != nil {
		target = p.Target
	}
	kept, err := pair.start(ctx, RoleTarget, target, &pair.target)
	if err != nil {
		return nil, err
	}
	a, err := pair.start(ctx, RoleInitiator, p.Command, &pair.initiator)
	if err != nil {
		return nil, err
	}
	pair.targetCard, pair.initiatorCard, pair.Version, pair.Settings = kept.Card, a.Card, a.Version,
		a.Settings
	if p.Target != nil {
		pair.Settings += "; " + kept.Settings
	}
	return pair, pair.meet(ctx)
}

// start starts and opens one end.
func (p *Pair) start(ctx context.Context, role string, command []string, driver **Driver) (a Answer,
	err error) {
	if *driver, err = StartDriver(p.Name+" "+role, command, p.Env); err != nil {
		return a, err
	}
	return (*driver).Ask(ctx, Request{Do: DoOpen, Lane: string(p.Lane), Role: role, Name: role,
		Bytes: p.Memory}, openLimit)
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
	if _, err := p.target.Ask(ctx, Request{Do: DoConnect, Card: p.initiatorCard},
		askLimit); err != nil {
		return err
	}
	return p.serve(ctx, false)
}

// first moves one piece.
func (p *Pair) first(ctx context.Context) (Answer, error) {
	if _, err := p.ask(ctx, Request{Do: DoPrepare, Op: "write", Size: sizes[0],
		Local: [][]int32{{0}}, Remote: [][]int32{{0}}}); err != nil {
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
	// ours takes none, and takes a peer that is stopped for lost
	p.greedy = p.idle > greedyFrom && !p.Ours
	return p.idle, nil
}

// cache has the page cache of a file be in the same state for all: past whole blocks there is
// nothing in it, and pieces that are none find all of the file there.
func (p *Pair) cache(ctx context.Context, s *Shape) error {
	if p.Lane != File {
		return nil
	}
	_, err := p.target.Ask(ctx, Request{Do: DoCache, On: s.Size%wholeBlock != 0}, askLimit)
	return err
}

// check has one operation move bytes that were not there before and compares both ends.
func (p *Pair) check(ctx context.Context, s *Shape, local, remote []int32, seed uint64) error {
	from, to := p.initiator, p.target
	slots := [][]int32{local, remote}
	if s.Op == "read" {
		from, to = to, from
		slots[0], slots[1] = slots[1], slots[0]
	}
	if _, err := from.Ask(ctx, Request{Do: DoStamp, Size: s.Size, Slots: slots[0], Seed: seed},
		askLimit); err != nil {
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
		return fmt.Errorf("%s: the bytes that arrived are not those that were sent: %w", s,
			ErrNonsense)
	}
	return nil
}

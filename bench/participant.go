// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"
)

// Participant is a program on one lane: an engine with settings, or what engines are measured
// beside.
type Participant struct {
	Name    string // as tables have it
	Lane    Lane
	Command []string // the driver
	Target  []string // the driver of the target, where it is another: of a file, what keeps it
	Env     []string // NAME=VALUE, beside the environment

	Ours      bool // it is sluice
	Scripted  bool // its driver is no compiled program: calls into the library cost something
	Yardstick bool // a baseline that ratios are over: no engine, which leads nobody
	Alone     bool // one process that holds both memories: no target
	Blind     bool // its content cannot be checked: the driver checks it itself, or nobody does
	Timed     bool // it measures itself, once a shape

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

	target, initiator *Driver // target is nil where it is Alone
	greedy            bool    // it takes processors while nothing is asked of it
}

// OpenPair starts both ends with so many bytes of memory, connects them, and moves a first piece.
func OpenPair(ctx context.Context, p Participant, local, remote uint64, threads int) (_ *Pair,
	err error) {
	if p.Needs != nil {
		if err := p.Needs(); err != nil {
			return nil, err
		}
	}
	if _, err := os.Stat(p.Command[0]); err != nil {
		return nil, fmt.Errorf("%s is not there: %w: %w", p.Command[0], err, ErrUnsupported)
	}
	pair := &Pair{Participant: p}
	defer func() {
		if err != nil {
			pair.Close()
		}
	}()
	open := Request{Do: DoOpen, Lane: string(p.Lane), Threads: threads}
	start := func(role string, command []string, bytes, far uint64, driver **Driver) (a Answer,
		err error) {
		if *driver, err = StartDriver(p.Name+" "+role, command, p.Env); err != nil {
			return a, err
		}
		r := open
		r.Role, r.Name, r.Bytes, r.FarBytes = role, role, bytes, far
		return (*driver).Ask(ctx, r, openLimit)
	}
	var kept Answer
	far := remote
	if !p.Alone {
		far = 0
		command := p.Command
		if p.Target != nil {
			command = p.Target
		}
		if kept, err = start(RoleTarget, command, remote, 0, &pair.target); err != nil {
			return nil, err
		}
	}
	a, err := start(RoleInitiator, p.Command, local, far, &pair.initiator)
	if err != nil {
		return nil, err
	}
	pair.Version, pair.Settings = a.Version, a.Settings
	if p.Target != nil {
		pair.Settings += "; " + kept.Settings
	}
	if p.Alone {
		return pair, nil
	}

	// The target learns of the initiator behind the first contact: it needs that only to answer
	// messages.
	if err := pair.serve(ctx, true); err != nil {
		return nil, err
	}
	if _, err := pair.initiator.Ask(ctx, Request{Do: DoConnect, Card: kept.Card},
		askLimit); err != nil {
		return nil, err
	}
	if !p.Blind {
		if err := pair.first(ctx); err != nil {
			return nil, err
		}
	}
	if _, err := pair.target.Ask(ctx, Request{Do: DoConnect, Card: a.Card}, askLimit); err != nil {
		return nil, err
	}
	return pair, pair.serve(ctx, false)
}

// first moves one piece.
func (p *Pair) first(ctx context.Context) error {
	if _, err := p.ask(ctx, Request{Do: DoPrepare, Op: "write", Size: sizes[0],
		Local: [][]int32{{0}}, Remote: [][]int32{{0}}}); err != nil {
		return err
	}
	_, err := p.ask(ctx, Request{Do: DoOnce})
	return err
}

// ask asks the initiator.
func (p *Pair) ask(ctx context.Context, r Request) (Answer, error) {
	return p.initiator.Ask(ctx, r, askLimit+time.Duration(r.NS))
}

// serve tells the target that the initiator works now, or no longer.
func (p *Pair) serve(ctx context.Context, on bool) error {
	if p.target == nil {
		return nil
	}
	_, err := p.target.Ask(ctx, Request{Do: DoServe, On: on}, askLimit)
	return err
}

// ends are the drivers that there are.
func (p *Pair) ends() []*Driver {
	return slices.DeleteFunc([]*Driver{p.initiator, p.target}, func(d *Driver) bool {
		return d == nil
	})
}

// CPU is what both ends have taken of processors so far.
func (p *Pair) CPU() (sum time.Duration) {
	for _, d := range p.ends() {
		sum += d.CPU()
	}
	return sum
}

// Rest stops a pair that would cost the others; Wake continues it.
func (p *Pair) Rest() {
	for _, d := range p.ends() {
		if p.greedy {
			d.Stop()
		}
	}
}

// Wake continues a pair that Rest has stopped.
func (p *Pair) Wake() {
	for _, d := range p.ends() {
		d.Resume()
	}
}

// Close ends both processes.
func (p *Pair) Close() {
	for _, d := range p.ends() {
		d.Close(endGrace)
	}
}

// whole reports whether both processes live.
func (p *Pair) whole() bool {
	return !slices.ContainsFunc(p.ends(), func(d *Driver) bool {
		select {
		case <-d.exited:
			return true
		default:
			return false
		}
	})
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
	share := float64(p.CPU()-before) / float64(time.Since(begin))
	// ours takes none, and takes a peer that is stopped for lost
	p.greedy = share > greedyFrom && !p.Ours
	return share, nil
}

// cache has the page cache of a file be in the same state for all: past whole blocks there is
// nothing in it, and pieces that are none find all of the file there.
func (p *Pair) cache(ctx context.Context, s *Shape) error {
	if p.Lane != File || p.target == nil {
		return nil
	}
	_, err := p.target.Ask(ctx, Request{Do: DoCache, On: s.Size%wholeBlock != 0}, askLimit)
	return err
}

// check has one operation move bytes that were not there before and compares both ends.
func (p *Pair) check(ctx context.Context, s *Shape, local, remote []int32, seed uint64) error {
	if s.Size < stampBytes {
		return nil
	}
	type side struct {
		d     *Driver
		slots []int32
		far   bool
	}
	from, to := side{p.initiator, local, false}, side{p.target, remote, false}
	if p.Alone {
		to = side{p.initiator, remote, true}
	}
	if s.Op == OpRead {
		from, to = to, from
	}
	if _, err := from.d.Ask(ctx, Request{Do: DoStamp, Size: s.Size, Slots: from.slots,
		Far: from.far, Seed: seed}, askLimit); err != nil {
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
	for i, e := range []side{from, to} {
		a, err := e.d.Ask(ctx, Request{Do: DoDigest, Size: s.Size, Slots: e.slots, Far: e.far},
			askLimit)
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

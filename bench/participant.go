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

// Participant is a program that is measured on one lane: an engine with its settings, or a baseline
// for engines.
type Participant struct {
	Name    string // in tables
	Lane    Lane
	Command []string // starts the driver
	Target  []string // starts the target's driver if it is another, as for a file; nil: Command
	Env     []string // NAME=VALUE, added to the environment

	Ours      bool // it is sluice
	Scripted  bool // its driver is a script, so its calls into the library take longer
	Yardstick bool // a baseline for ratios, not an engine: Report.Leads leaves it out
	Alone     bool // one process holds both memories, so there is no target
	Blind     bool // the harness cannot check that its bytes arrive; the driver may do so itself
	Timed     bool // a program that measures itself, once for each shape

	// Needs returns an error that says why the participant cannot run on this machine, and what to
	// do; nil: it always can.
	Needs func() error
}

// Time limits. A driver that exceeds the limit of a request counts as hung and is killed.
const (
	openLimit = 60 * time.Second // DoOpen faults in the memory, perhaps on a busy machine
	askLimit  = 30 * time.Second // any other request
	endGrace  = 3 * time.Second  // from the end of the requests to the end of the driver
)

// Pair is a running participant: the drivers of its two ends.
type Pair struct {
	Participant
	Version, Settings string

	target, initiator *Driver // target is nil if it is Alone
	greedy            bool    // it uses CPU time while idle, so Rest stops it
}

// OpenPair starts both ends, which register local and remote bytes of memory, connects them, and
// moves a first piece.
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
	var opened Answer // the target's
	far := remote
	if !p.Alone {
		far = 0
		command := p.Command
		if p.Target != nil {
			command = p.Target
		}
		if opened, err = start(RoleTarget, command, remote, 0, &pair.target); err != nil {
			return nil, err
		}
	}
	a, err := start(RoleInitiator, p.Command, local, far, &pair.initiator)
	if err != nil {
		return nil, err
	}
	pair.Version, pair.Settings = a.Version, a.Settings
	if p.Target != nil {
		pair.Settings += "; " + opened.Settings
	}
	if p.Alone {
		return pair, nil
	}

	// The target connects to the initiator only after the first piece has moved: it needs that
	// connection only to answer messages.
	if err := pair.serve(ctx, true); err != nil {
		return nil, err
	}
	if _, err := pair.initiator.Ask(ctx, Request{Do: DoConnect, Card: opened.Card},
		askLimit); err != nil {
		return nil, err
	}
	if !p.Blind {
		if err := pair.moveFirst(ctx); err != nil {
			return nil, err
		}
	}
	if _, err := pair.target.Ask(ctx, Request{Do: DoConnect, Card: a.Card}, askLimit); err != nil {
		return nil, err
	}
	return pair, pair.serve(ctx, false)
}

// moveFirst writes one piece.
func (p *Pair) moveFirst(ctx context.Context) error {
	if _, err := p.ask(ctx, Request{Do: DoPrepare, Op: "write", Size: sizes[0],
		Local: [][]int32{{0}}, Remote: [][]int32{{0}}}); err != nil {
		return err
	}
	_, err := p.ask(ctx, Request{Do: DoOnce})
	return err
}

// ask sends a request to the initiator and returns the answer.
func (p *Pair) ask(ctx context.Context, r Request) (Answer, error) {
	return p.initiator.Ask(ctx, r, askLimit+time.Duration(r.NS))
}

// serve tells the target that the initiator starts to post operations, or has stopped: a target may
// have to make progress meanwhile.
func (p *Pair) serve(ctx context.Context, on bool) error {
	if p.target == nil {
		return nil
	}
	_, err := p.target.Ask(ctx, Request{Do: DoServe, On: on}, askLimit)
	return err
}

// ends returns the drivers that run: one or two.
func (p *Pair) ends() []*Driver {
	return slices.DeleteFunc([]*Driver{p.initiator, p.target}, func(d *Driver) bool {
		return d == nil
	})
}

// CPU returns the CPU time that both ends have used so far.
func (p *Pair) CPU() (sum time.Duration) {
	for _, d := range p.ends() {
		sum += d.CPU()
	}
	return sum
}

// Rest stops the processes of a greedy pair, so that it does not slow down the others.
func (p *Pair) Rest() {
	for _, d := range p.ends() {
		if p.greedy {
			d.Stop()
		}
	}
}

// Wake continues the processes that Rest has stopped.
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

// alive reports whether all processes of the pair run.
func (p *Pair) alive() bool {
	return !slices.ContainsFunc(p.ends(), func(d *Driver) bool {
		select {
		case <-d.exited:
			return true
		default:
			return false
		}
	})
}

// greedyFrom: a pair that uses a larger share of one CPU while idle is greedy.
const greedyFrom = 0.02

// Idle measures the CPU time that the pair uses while it is idle, as a share of one CPU.
func (p *Pair) Idle(ctx context.Context, span time.Duration) (float64, error) {
	before, begin := p.CPU(), time.Now()
	select {
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	case <-time.After(span):
	}
	share := float64(p.CPU()-before) / float64(time.Since(begin))
	// Never stop sluice: it uses no CPU time while idle, and declares a stopped peer lost.
	p.greedy = share > greedyFrom && !p.Ours
	return share, nil
}

// cache puts the page cache into the same state for all participants. Shapes of whole blocks bypass
// the page cache and find nothing of the file in it. Other shapes find the whole file in it.
func (p *Pair) cache(ctx context.Context, s *Shape) error {
	if p.Lane != File && p.Lane != CacheDisk || p.target == nil {
		return nil
	}
	_, err := p.target.Ask(ctx, Request{Do: DoCache, On: s.Size%wholeBlock != 0}, askLimit)
	return err
}

// check writes new stamps at the source, lets the pair do one operation, and compares digests of
// both ends.
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

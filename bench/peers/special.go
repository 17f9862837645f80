// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sluicehq/sluice/bench"
)

// The shapes of what is measured beside transfers.
const (
	handoverPieces = 100_000
	handoverSize   = 656
	regionCount    = 2048
	regionSize     = 4096
	pingSize       = 64
	pingCount      = 500 // round trips at a time at most
	pingProbe      = 20  // the first ones, which say how many fit pingTime
	pingTime       = 2 * time.Second
	smallMemory    = 16 << 20 // of pairs that are opened for one figure
)

// repeats is how often what happens once a connection is measured.
func (o *Options) repeats() int {
	if o.Quick {
		return 1
	}
	return 3
}

// each runs a measurement with each participant in turn. It makes its rows itself; an error is one
// more, unless the context ended.
func (r *runner) each(ctx context.Context, kind string, shape Shape, seats []*seat,
	measure func(*seat) error) error {
	for _, s := range seats {
		if r.late() {
			r.report.add(s.failed(kind, shape, errLate))
			continue
		}
		r.o.Progress(fmt.Sprintf("%s: %s, %s", s.Lane, kind, s.Name))
		s.reason = nil
		s.turn(func() error { return measure(s) })
		if err := ended(ctx); err != nil {
			return err
		}
		if s.reason == nil {
			continue
		}
		r.report.add(s.failed(kind, shape, s.reason))
		if err := r.replace(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

// handovers measures a long list that is used once: nothing is prepared.
func (r *runner) handovers(ctx context.Context) error {
	shape := Shape{Op: "write", Size: handoverSize, Batch: handoverPieces}
	if shape.Bytes() > r.o.Memory {
		return nil
	}
	local, remote := shape.places(r.o.Memory)
	request := Request{Do: DoHandover, Op: shape.Op, Size: shape.Size, Local: local[:1],
		Remote: remote[:1]}
	return r.each(ctx, KindHandover, shape, r.present(false), func(s *seat) error {
		if err := s.pair.serve(ctx, true); err != nil {
			return err
		}
		var prepared, whole, cpus []float64
		for n := range max(r.o.repeats(), 2) { // the first one warms up
			if n > 1 && r.late() {
				break
			}
			before := s.pair.CPU()
			a, err := s.pair.ask(ctx, request)
			if err != nil {
				return err
			}
			prepared, whole = append(prepared, float64(a.PrepareNS)/1e3),
				append(whole, float64(a.NS)/1e3)
			cpus = append(cpus, (s.pair.CPU()-before).Seconds()/(float64(shape.Bytes())/1e9))
		}
		row := s.row(KindHandover)
		row.Shape, row.PrepareUS, row.P50us, row.CPUPerGB = shape, bench.Median(prepared[1:]),
			bench.Median(whole[1:]), bench.Median(cpus[1:])
		row.GBps = bench.GBps(shape.Bytes(), time.Duration(row.P50us*1e3))
		row.DescsPerS, row.Ops = row.GBps*1e9/handoverSize, len(whole)-1
		r.report.add(row)
		return s.pair.serve(ctx, false)
	})
}

// pings measures round trips of notifications.
func (r *runner) pings(ctx context.Context) error {
	shape := Shape{Size: pingSize, Batch: 1}
	return r.each(ctx, KindPing, shape, r.present(false), func(s *seat) error {
		var t tally
		var note string
		count := pingProbe
		for i := range r.o.repeats() + 1 {
			a, took, err := s.pair.ping(ctx, count)
			if err != nil {
				return err
			}
			if i > 0 { // the first ones warm up
				t.add(&a, pingSize, 0)
			}
			note = a.Text
			count = min(max(int(pingTime*time.Duration(count)/max(took, 1)), pingProbe), pingCount)
		}
		row := s.row(KindPing)
		row.Shape = shape
		t.fill(&row)
		row.GBps, row.DescsPerS, row.CPUPerGB, row.Note = 0, 0, 0, note
		r.report.add(row)
		return nil
	})
}

// ping has the ends send so many messages to and fro.
func (p *Pair) ping(ctx context.Context, count int) (a Answer, took time.Duration, err error) {
	begin := time.Now()
	if err := p.target.Send(Request{Do: DoPong, Count: count, Size: pingSize},
		askLimit); err != nil {
		return a, 0, err
	}
	if a, err = p.ask(ctx, Request{Do: DoPing, Count: count, Size: pingSize}); err != nil {
		p.target.Kill() // it waits for what does not come
		return a, 0, err
	}
	_, err = p.target.Await(ctx, DoPong, askLimit)
	return a, time.Since(begin), err
}

// calls measures what the language of a script costs for one call into the library.
func (r *runner) calls(ctx context.Context) error {
	shape := Shape{Op: "write", Size: sizes[0], Batch: 1}
	scripts := slices.DeleteFunc(r.present(false), func(s *seat) bool { return !s.Scripted })
	return r.each(ctx, KindCall, shape, scripts, func(s *seat) error {
		if _, err := s.pair.ask(ctx, Request{Do: DoPrepare, Op: shape.Op, Size: shape.Size,
			Local: [][]int32{{0}}, Remote: [][]int32{{0}}}); err != nil {
			return err
		}
		if err := s.pair.serve(ctx, true); err != nil { // for the operation before it
			return err
		}
		a, err := s.pair.ask(ctx, Request{Do: DoNull})
		if err := errors.Join(err, s.pair.serve(ctx, false)); err != nil {
			return err
		}
		var t tally
		t.samples = a.Samples
		row := s.row(KindCall)
		t.fill(&row)
		r.report.add(row)
		return nil
	})
}

// alone runs a measurement with each participant that is not out. It opens what it needs itself.
func (r *runner) alone(ctx context.Context, kind string, measure func(*seat) error) error {
	for _, s := range r.seats {
		if s.Yardstick || s.failures >= failuresMax {
			continue
		}
		if r.late() {
			r.report.add(s.failed(kind, Shape{}, errLate))
			continue
		}
		r.o.Progress(fmt.Sprintf("%s: %s, %s", s.Lane, kind, s.Name))
		err := measure(s)
		if ended(ctx) != nil {
			return ended(ctx)
		}
		if err != nil {
			r.report.add(s.failed(kind, Shape{}, err))
		}
	}
	return nil
}

// contacts measures from the other end's description to the first bytes there.
func (r *runner) contacts(ctx context.Context) error {
	return r.alone(ctx, KindContact, func(s *seat) error {
		var list []float64
		for range r.o.repeats() {
			if len(list) > 0 && r.late() {
				break
			}
			pair, err := OpenPair(ctx, s.Participant, smallMemory)
			if err != nil {
				return err
			}
			list = append(list, float64(pair.Contact)/1e3)
			pair.Close()
		}
		row := s.row(KindContact)
		row.P50us, row.Ops = bench.Median(list), len(list)
		r.report.add(row)
		return nil
	})
}

// regions measures registering and describing many regions, and what the other end takes to learn
// of them.
func (r *runner) regions(ctx context.Context) error {
	return r.alone(ctx, KindRegions, func(s *seat) error {
		target, err := StartDriver(s.Name+" regions", s.Command, s.Env)
		if err != nil {
			return err
		}
		defer target.Close(endGrace)
		initiator, err := StartDriver(s.Name+" learner", s.Command, s.Env)
		if err != nil {
			return err
		}
		defer initiator.Close(endGrace)
		for role, d := range map[string]*Driver{RoleTarget: target, RoleInitiator: initiator} {
			if _, err := d.Ask(ctx, Request{Do: DoOpen, Lane: string(s.Lane), Role: role,
				Name: role, Bytes: smallMemory}, openLimit); err != nil {
				return err
			}
		}
		a, err := target.Ask(ctx, Request{Do: DoRegions, Count: regionCount, Size: regionSize},
			askLimit)
		if err != nil {
			return err
		}
		row := s.row(KindRegions)
		row.Shape = Shape{Size: regionSize, Batch: regionCount}
		row.PrepareUS, row.P50us, row.Bytes = float64(a.PrepareNS)/1e3, float64(a.NS)/1e3, a.Bytes
		r.report.add(row)
		if _, err := target.Ask(ctx, Request{Do: DoServe, On: true}, askLimit); err != nil {
			return err
		}
		learned, err := initiator.Ask(ctx, Request{Do: DoConnect, Card: a.Card}, askLimit)
		if err != nil {
			return err
		}
		row = s.row(KindLearn)
		row.Shape, row.P50us = Shape{Size: regionSize, Batch: regionCount}, float64(learned.NS)/1e3
		r.report.add(row)
		return nil
	})
}

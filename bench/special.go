// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sluicehq/sluice/internal/figures"
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

// engines are those that have a pair of processes.
func (r *runner) engines() []*entrant {
	return slices.DeleteFunc(r.present(), func(e *entrant) bool { return e.Alone || e.Yardstick })
}

// each runs a measurement with each participant in turn. It makes its rows itself; an error is one
// more, unless the context ended.
func (r *runner) each(ctx context.Context, kind string, shape Shape, entrants []*entrant,
	measure func(*entrant) error) error {
	for _, e := range entrants {
		if r.late() {
			r.report.add(e.failed(kind, shape, errLate))
			continue
		}
		r.o.Progress(fmt.Sprintf("%s: %s, %s", e.Lane, kind, e.Name))
		e.reason = nil
		e.turn(func() error { return measure(e) })
		if err := ended(ctx); err != nil {
			return err
		}
		if e.reason == nil {
			continue
		}
		r.report.add(e.failed(kind, shape, e.reason))
		if err := r.replace(ctx, e); err != nil {
			return err
		}
	}
	return nil
}

// handovers measures a long list that is used once: nothing is prepared.
func (r *runner) handovers(ctx context.Context) error {
	shape := Shape{Op: OpWrite, Size: handoverSize, Batch: handoverPieces, Where: Scattered,
		Spread: r.o.Memory}
	if shape.Bytes() > r.o.Memory {
		return nil
	}
	local, remote := shape.places()
	request := Request{Do: DoHandover, Op: shape.Op, Size: shape.Size, Local: local[:1],
		Remote: remote[:1]}
	return r.each(ctx, KindHandover, shape, r.engines(), func(e *entrant) error {
		if err := e.pair.serve(ctx, true); err != nil {
			return err
		}
		var prepared, whole, cpus []float64
		for n := range max(r.o.repeats(), 2) { // the first one warms up
			if n > 1 && r.late() {
				break
			}
			before := e.pair.CPU()
			a, err := e.pair.ask(ctx, request)
			if err != nil {
				return err
			}
			prepared, whole = append(prepared, float64(a.PrepareNS)/1e3),
				append(whole, float64(a.NS)/1e3)
			cpus = append(cpus, (e.pair.CPU()-before).Seconds()/(float64(shape.Bytes())/1e9))
		}
		row := e.row(KindHandover)
		row.Shape, row.PrepareUS, row.P50us, row.CPUPerGB = shape, figures.Median(prepared[1:]),
			figures.Median(whole[1:]), figures.Median(cpus[1:])
		row.GBps = figures.GBps(shape.Bytes(), time.Duration(row.P50us*1e3))
		row.DescsPerS, row.Ops = row.GBps*1e9/handoverSize, len(whole)-1
		r.report.add(row)
		return e.pair.serve(ctx, false)
	})
}

// pings measures round trips of notifications.
func (r *runner) pings(ctx context.Context) error {
	shape := Shape{Size: pingSize, Batch: 1}
	pairs := slices.DeleteFunc(r.present(), func(e *entrant) bool { return e.Alone || e.Timed })
	return r.each(ctx, KindPing, shape, pairs, func(e *entrant) error {
		var t tally
		var note string
		count := pingProbe
		for i := range r.o.repeats() + 1 {
			a, took, err := e.pair.ping(ctx, count)
			if err != nil {
				return err
			}
			if i > 0 { // the first ones warm up
				t.add(&a, pingSize, 0)
			}
			note = a.Text
			count = min(max(int(pingTime*time.Duration(count)/max(took, 1)), pingProbe), pingCount)
		}
		row := e.row(KindPing)
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
	shape := Shape{Op: OpWrite, Size: sizes[0], Batch: 1, Where: Scattered}
	scripts := slices.DeleteFunc(r.engines(), func(e *entrant) bool { return !e.Scripted })
	return r.each(ctx, KindCall, shape, scripts, func(e *entrant) error {
		if _, err := e.pair.ask(ctx, Request{Do: DoPrepare, Op: shape.Op, Size: shape.Size,
			Local: [][]int32{{0}}, Remote: [][]int32{{0}}}); err != nil {
			return err
		}
		if err := e.pair.serve(ctx, true); err != nil { // for the operation before it
			return err
		}
		a, err := e.pair.ask(ctx, Request{Do: DoNull})
		if err := errors.Join(err, e.pair.serve(ctx, false)); err != nil {
			return err
		}
		var t tally
		t.samples = a.Samples
		row := e.row(KindCall)
		t.fill(&row)
		r.report.add(row)
		return nil
	})
}

// alone runs a measurement with each participant that is not out. It opens what it needs itself.
func (r *runner) alone(ctx context.Context, kind string, measure func(*entrant) error) error {
	for _, e := range r.entrants {
		if e.Yardstick || e.Alone || e.failures >= failuresMax {
			continue
		}
		if r.late() {
			r.report.add(e.failed(kind, Shape{}, errLate))
			continue
		}
		r.o.Progress(fmt.Sprintf("%s: %s, %s", e.Lane, kind, e.Name))
		err := measure(e)
		if ended(ctx) != nil {
			return ended(ctx)
		}
		if err != nil {
			r.report.add(e.failed(kind, Shape{}, err))
		}
	}
	return nil
}

// contacts measures from the other end's description to the first bytes there.
func (r *runner) contacts(ctx context.Context) error {
	return r.alone(ctx, KindContact, func(e *entrant) error {
		var list []float64
		for range r.o.repeats() {
			if len(list) > 0 && r.late() {
				break
			}
			pair, err := OpenPair(ctx, e.Participant, smallMemory, smallMemory, 1)
			if err != nil {
				return err
			}
			list = append(list, float64(pair.Contact)/1e3)
			pair.Close()
		}
		row := e.row(KindContact)
		row.P50us, row.Ops = figures.Median(list), len(list)
		r.report.add(row)
		return nil
	})
}

// regions measures registering and describing many regions, and what the other end takes to learn
// of them.
func (r *runner) regions(ctx context.Context) error {
	return r.alone(ctx, KindRegions, func(e *entrant) error {
		target, err := StartDriver(e.Name+" regions", e.Command, e.Env)
		if err != nil {
			return err
		}
		defer target.Close(endGrace)
		initiator, err := StartDriver(e.Name+" learner", e.Command, e.Env)
		if err != nil {
			return err
		}
		defer initiator.Close(endGrace)
		for role, d := range map[string]*Driver{RoleTarget: target, RoleInitiator: initiator} {
			if _, err := d.Ask(ctx, Request{Do: DoOpen, Lane: string(e.Lane), Role: role,
				Name: role, Bytes: smallMemory}, openLimit); err != nil {
				return err
			}
		}
		a, err := target.Ask(ctx, Request{Do: DoRegions, Count: regionCount, Size: regionSize},
			askLimit)
		if err != nil {
			return err
		}
		row := e.row(KindRegions)
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
		row = e.row(KindLearn)
		row.Shape, row.P50us = Shape{Size: regionSize, Batch: regionCount}, float64(learned.NS)/1e3
		r.report.add(row)
		return nil
	})
}

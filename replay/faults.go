// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sluicehq/sluice/backends/fault"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/handoff"
)

// faultSeed makes the faults of a replay the same each time.
const faultSeed = 7

// faultSets are the faults that Options.Faults can name.
var faultSets = map[string][]fault.Rule{
	"slow": {
		{On: fault.Batch, Do: fault.Delay(200*time.Microsecond, 200*time.Microsecond)},
		{On: fault.Batch, Chance: 0.3, Do: fault.Late(300*time.Microsecond, 200*time.Microsecond)},
		{On: fault.Message, Chance: 0.2, Do: fault.Late(2*time.Millisecond, 0)},
	},
	"failing": {
		{On: fault.Write, Chance: 0.005, Do: fault.Fail(driver.ErrPeerLost)},
		{On: fault.Read, Chance: 0.005, Do: fault.Fail(driver.ErrPeerLost)},
	},
	"lossy": { // completions never come; each costs a quarter of the limit
		{On: fault.Write, Chance: 0.003, Most: 1, Do: fault.Drop()},
		{On: fault.Batch, Chance: 0.002, Most: 1, Do: fault.Swallow()},
	},
	"flapping": {{On: fault.Message, Every: 60, Most: 4, Do: fault.Flap(50 * time.Millisecond)}},
	// Against the contract: what checks the bytes has to find it.
	"corrupt": {{On: fault.Write, Every: 40, Do: fault.BreakCorrupt()}},
}

// FaultNames lists what Options.Faults can name.
func FaultNames() []string { return slices.Sorted(maps.Keys(faultSets)) }

// faultRules returns the rules of sets whose names are given with commas between.
func faultRules(names string) (rules []fault.Rule, err error) {
	for name := range strings.SplitSeq(names, ",") {
		set, ok := faultSets[name]
		if !ok {
			return nil, fmt.Errorf("no faults are named %q: want some of %s", name,
				strings.Join(FaultNames(), ", "))
		}
		rules = append(rules, set...)
	}
	return rules, nil
}

// CheckFaults says what is wrong with names of faults.
func CheckFaults(names string) error {
	_, err := faultRules(names)
	return err
}

// triesMax is how often a request is handed over when faults were asked for.
const triesMax = 30

// faulty reports whether faults were asked for, on either side.
func (p *Plan) faulty() bool { return len(p.Faults) > 0 }

// patience is how long a side waits for one step of the other. Where completions may not
// come at all, a few such waits fit into the limit.
func patience(limit time.Duration, faults map[Side]string) time.Duration {
	if len(faults) > 0 {
		return limit / 4
	}
	return limit
}

func (p *Plan) patience() time.Duration { return patience(p.limit(), p.Faults) }

// openFaulty opens the backends of a process, with the faults that were asked for.
func openFaulty(open OpenFunc, backend string, threads int, faults string) ([]driver.Backend,
	error) {
	list, err := open(backend, threads)
	if err != nil || faults == "" {
		return list, err
	}
	rules, err := faultRules(faults)
	for i := range list {
		if err == nil {
			list[i], err = wrap(list[i], rules)
		}
	}
	if err != nil {
		for _, b := range list {
			err = errors.Join(err, b.Close())
		}
		return nil, err
	}
	return list, nil
}

// openEngine opens the engine of a process over its backends, with the faults that were asked for.
func openEngine(open OpenFunc, name, backend string, threads int, limit time.Duration,
	faults string) (*engine.Engine, []driver.Backend, error) {
	list, err := openFaulty(open, backend, threads, faults)
	if err != nil {
		return nil, nil, err
	}
	eng, err := engine.Open(engine.Config{Name: name, Backends: list, TransferTimeout: limit,
		ConnectTimeout: limit, HandshakeTimeout: limit})
	return eng, list, err
}

// routeOf is the route that the command line asked for.
func routeOf(backend string) engine.Route {
	if backend == "auto" {
		return engine.Route{}
	}
	return engine.Route{Only: backend}
}

// wrap returns the backend itself with an error, so that it can be closed.
func wrap(b driver.Backend, rules []fault.Rule) (driver.Backend, error) {
	w, err := fault.Wrap(b, faultSeed, rules...)
	if err != nil {
		return b, err
	}
	return w, nil
}

// faultsFired adds up how often rules have fired.
func faultsFired(list []driver.Backend) (n uint64) {
	for _, b := range list {
		if f, ok := b.(*fault.Backend); ok {
			for _, fired := range f.Fired() {
				n += fired
			}
		}
	}
	return n
}

// dial connects to the decode process. With faults it may take several tries.
func (p *prefill) dial() (err error) {
	ctx, cancel := context.WithTimeout(p.ctx, p.plan.limit())
	defer cancel()
	for {
		if p.peer, err = p.eng.Dial(ctx, "unix", p.plan.Meeting); err == nil || !p.plan.faulty() {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// handOver is what one request comes to. With faults what has failed is tried again, over a
// connection of its own: the other one may be dead, or known as dead on the other side.
func (p *prefill) handOver(i int, blocks []handoff.Block) (push *handoff.Push, err error) {
	for try := 1; ; try++ {
		push, err = p.sender.Begin(p.ctx, p.peer, uint64(try-1)<<32|uint64(i), blocks)
		if err == nil {
			err = p.push(push, &p.plan.Requests[i], i)
		}
		if err == nil || p.asPlanned(i, err) || !p.plan.faulty() || p.ctx.Err() != nil {
			return push, err
		}
		if try == triesMax {
			return push, fmt.Errorf("in %d tries: %w", try, err)
		}
		if err := p.tidyUp(push); err != nil {
			return nil, err
		}
		p.res.Retried++
		p.progress(0)
	}
}

// tidyUp ends a try that has failed, so that the next one may write to the same memory.
func (p *prefill) tidyUp(push *handoff.Push) error {
	if push != nil {
		if err := push.Abort(p.ctx); err != nil {
			return err
		}
	}
	for len(p.landed) > 0 {
		p.count(push, <-p.landed)
	}
	_ = p.peer.Close()
	return p.dial()
}

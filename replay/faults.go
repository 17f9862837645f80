// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sluicehq/sluice/backends/fault"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
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

// patience is how long a side waits for one step of the other. Where completions may not come at
// all, a few such waits fit into the limit.
func (p *plan) patience() time.Duration {
	if len(p.Faults) > 0 {
		return p.limit() / 4
	}
	return p.limit()
}

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
func openEngine(open OpenFunc, name string, p *plan, side Side) (*engine.Engine, []driver.Backend,
	error) {
	list, err := openFaulty(open, p.Backend, p.Threads, p.Faults[side])
	if err != nil {
		return nil, nil, err
	}
	limit := p.patience()
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

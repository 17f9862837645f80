// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

// triesMax is how often a timed test runs, and againMax how many tests of a run may need a second
// try: a machine on which more are late shows nothing.
const triesMax, againMax = 3, 2

// standstill is the shortest that counts as evidence that the machine, and not the test, was late.
const standstill = 50 * time.Millisecond

// timed runs one package at a time, with nothing beside it but the meter. A test that failed is
// run again, alone, if the meter saw the machine stand still meanwhile and no promise was broken.
func (o *options) timed(ctx context.Context, list []*testPackage) (end summary) {
	m := startMeter(ctx)
	for range max(o.count, 1) {
		o.round(ctx, m, list, &end)
	}
	return end
}

// round runs the timed tests once.
func (o *options) round(ctx context.Context, m *meter, list []*testPackage, end *summary) {
	again := 0
	for _, p := range list {
		if ctx.Err() != nil {
			return
		}
		r := o.perform(ctx, invocation{p: p, match: o.match(p.tests...),
			disturb: o.disturbance(p, m)})
		if r.died {
			end.add(p, r)
			continue
		}
		failed := r.failed
		r.failed = nil
		for _, name := range failed {
			last, passed := r, false
			for try := 2; try <= triesMax && !passed; try++ {
				stood := m.longest(last.begins[name], last.ends[name])
				if last.broken || stood < standstill || try == 2 && again == againMax {
					break
				}
				if try == 2 {
					again++
				}
				last = o.perform(ctx, invocation{p: p, match: o.match(name),
					disturb: o.disturbance(p, m)})
				passed = last.ok && last.passed > 0
				end.again = append(end.again, fmt.Sprintf("%s %s: try %d, since the machine stood "+
					"still for %d ms: passed %v", p.short(), name, try, stood.Milliseconds(),
					passed))
			}
			if passed {
				r.passed++
			} else {
				r.failed = append(r.failed, name)
			}
		}
		r.ok = r.ok || len(failed) > 0 && len(r.failed) == 0
		end.add(p, r)
	}
}

// match is the pattern of tests by their names, with what -run says of their parts.
func (o *options) match(tests ...string) string {
	_, parts, ok := strings.Cut(o.run, "/")
	if ok {
		parts = "/" + parts
	}
	return "^(" + strings.Join(tests, "|") + ")$" + parts
}

// soak runs each test by itself, one after the other, until its time is over, and tells hack/soak
// how each has ended. A test that the end cuts off has not failed.
func (o *options) soak(ctx context.Context, list []*testPackage) (end summary) {
	if o.limit == 0 {
		o.limit = 1000 * time.Hour
	}
	until := time.Now().Add(o.limit)
	bounded, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	var cut []string
	for _, p := range list {
		for _, name := range slices.Clone(p.tests) {
			if bounded.Err() != nil {
				cut = append(cut, p.short()+" "+name)
				continue
			}
			r := o.perform(bounded, invocation{p: p, match: o.match(name),
				disturb: o.disturbance(p, nil)})
			if r.cut && !r.broken && len(r.failed) == 0 {
				cut = append(cut, p.short()+" "+name)
				continue
			}
			end.add(p, r)
			fmt.Fprintf(o.out, "soak: %s %s: %s in %.0f s%s\n", p.short(), name, r.verdict(),
				r.wall.Seconds(), r.chosen())
		}
	}
	if len(cut) > 0 {
		fmt.Fprintf(o.out, "soak: the time was over before %d tests: %q\n", len(cut), cut)
	}
	return end
}

// verdict says how a run of one test has ended.
func (r *result) verdict() string {
	switch {
	case !r.ok:
		return "FAILED"
	case r.passed == 0:
		return "skipped"
	case r.parts > 0:
		return fmt.Sprintf("passed but for %d parts that were skipped", r.parts)
	}
	return "passed"
}

// chosen names the seeds, "" without any.
func (r *result) chosen() string {
	if len(r.seeds) == 0 {
		return ""
	}
	return ", seeds " + strings.Join(r.seeds, " ")
}

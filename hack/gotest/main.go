// SPDX-License-Identifier: Apache-2.0

// Command gotest runs the tests of packages by tier, which a test's name tells:
//
//	gate   all tests that are not named otherwise; they do not depend on how fast the machine is
//	timed  TestTimed…: stopped and killed processes, cables, short limits over real sockets
//	soak   TestSoak…: hammers, crowds, seeds by the clock, full matrices
//
// It first compiles all test binaries, so that no compiler runs beside a test, and then runs them,
// the longest first. In the gate, packages that compute run two at a time and packages that wait
// four at a time, as packages.txt tells. Timed tests run one package at a time. A timed test that
// failed is tried again only if the machine stood still meanwhile (see meter) and if its output
// does not say that a promise was broken; at most two tests of a run may need that. Tests of the
// gate are never tried again.
//
// With -stall and -quota the tests must pass while their process is stopped every now and then, or
// held to a share of a core.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

// options are the flags.
type options struct {
	tier     string
	race     bool
	run      string
	count    int
	timeout  time.Duration
	limit    time.Duration // of all, soak only
	shard    string        // "2/6": of the soak
	stall    uint64        // seed, 0 is none
	quota    float64       // share of a core, 0 is none
	update   bool
	tool     string // the go command
	out      io.Writer
	patterns []string
	args     []string // for the test binaries
}

func main() {
	if err := start(); err != nil {
		fmt.Fprintln(os.Stderr, "gotest:", err)
		os.Exit(1)
	}
}

func start() error {
	o := options{out: os.Stdout}
	flag.StringVar(&o.tier, "tier", "gate", "gate, timed or soak")
	flag.BoolVar(&o.race, "race", false, "under the race detector")
	flag.StringVar(&o.run, "run", "", "only the tests of the tier whose names match")
	flag.IntVar(&o.count, "count", 1, "how often")
	flag.DurationVar(&o.timeout, "timeout", 20*time.Minute, "of one package's run")
	flag.DurationVar(&o.limit, "for", 0, "of a whole soak: what has not ended by then is cut off")
	flag.StringVar(&o.shard, "shard", "", "K/N: every N-th test of the soak, from the K-th")
	flag.Uint64Var(&o.stall, "stall", 0, "stop the test's process for 0.3 to 3 s every 0.3 to "+
		"1.5 s, by this seed")
	flag.Float64Var(&o.quota, "quota", 0, "hold the test's processes to this share of a core")
	flag.BoolVar(&o.update, "update", false, "write what packages took into packages.txt")
	flag.StringVar(&o.tool, "go", "go", "the go command")
	flag.Parse()
	o.patterns = flag.Args()
	if i := slices.Index(o.patterns, "--"); i >= 0 {
		o.patterns, o.args = o.patterns[:i], o.patterns[i+1:]
	}
	if _, ok := tiers[o.tier]; !ok || len(o.patterns) == 0 {
		return errors.New("usage: gotest [-tier gate|timed|soak] [flags] PACKAGE... [-- ARG...]")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return o.all(ctx)
}

// tiers are the names of tests.
var tiers = map[string]*regexp.Regexp{
	"gate": nil, "timed": regexp.MustCompile(`^TestTimed`), "soak": regexp.MustCompile(`^TestSoak`),
}

// belongs reports whether a test is of the tier and among those asked for.
func (o *options) belongs(test string) bool {
	for name, pattern := range tiers {
		if pattern != nil && pattern.MatchString(test) != (name == o.tier) {
			return false
		}
	}
	first, _, _ := strings.Cut(o.run, "/")
	return regexp.MustCompile(first).MatchString(test)
}

// all is the order of things: list, compile, run, tell.
func (o *options) all(ctx context.Context) error {
	began := time.Now()
	list, err := o.list(ctx)
	if err != nil {
		return err
	}
	list, err = o.choose(list)
	if err != nil {
		return err
	}
	dir, err := filepath.Abs(filepath.Join("build", "gotest"))
	if err != nil {
		return err
	}
	if err := o.compile(ctx, dir, list); err != nil {
		return err
	}
	built := time.Now()
	fmt.Fprintf(o.out, "gotest: %s, %d packages compiled in %.0f s\n", o.tier, len(list),
		built.Sub(began).Seconds())
	var end summary
	switch o.tier {
	case "gate":
		end = o.gate(ctx, list)
	case "timed":
		end = o.timed(ctx, list)
	case "soak":
		end = o.soak(ctx, list)
	}
	if o.update && ctx.Err() == nil {
		if err := writeTable(list); err != nil {
			return err
		}
	}
	end.print(o, list, time.Since(built))
	switch {
	case ctx.Err() != nil:
		return errors.New("interrupted")
	case len(end.failed) > 0:
		return fmt.Errorf("failed: %s", strings.Join(end.failed, ", "))
	case end.passed == 0:
		return fmt.Errorf("no test of the %s was run: does -run %q match one?", o.tier, o.run)
	}
	return nil
}

// summary adds up what runs said.
type summary struct {
	passed, skipped int
	failed          []string // packages, or tests of them
	again           []string // timed tests that were tried again, and why
}

func (s *summary) add(p *testPackage, r result) {
	s.passed += r.passed
	s.skipped += r.skipped
	for _, name := range r.failed {
		s.failed = append(s.failed, p.short()+" "+name)
	}
	if !r.ok && len(r.failed) == 0 {
		s.failed = append(s.failed, p.short())
	}
}

func (s *summary) print(o *options, list []*testPackage, wall time.Duration) {
	slices.SortFunc(list, func(a, b *testPackage) int { return int(b.wall - a.wall) })
	fmt.Fprintf(o.out, "gotest: %s in %.0f s; longest, in seconds (processor):", o.tier,
		wall.Seconds())
	for _, p := range list[:min(8, len(list))] {
		fmt.Fprintf(o.out, " %s %.0f (%.0f)", p.short(), p.wall.Seconds(),
			p.processor.Seconds())
	}
	fmt.Fprintln(o.out)
	if o.tier == "timed" {
		fmt.Fprintf(o.out, "TIMED %d tests, %d tried again\n", s.passed+len(s.failed), len(s.again))
		for _, line := range s.again {
			fmt.Fprintln(o.out, "TIMED", line)
		}
	}
	fmt.Fprintf(o.out, "%s: %d passed, %d failed, %d skipped\n", o.tier, s.passed, len(s.failed),
		s.skipped)
}

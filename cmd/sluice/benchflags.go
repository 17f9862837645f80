// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/bench"
)

// resultFlags say how results are told.
type resultFlags struct {
	format string
	asJSON bool
	given  func(flag string) bool // whether the command line has it
}

func (f *resultFlags) register(c *cobra.Command) {
	s := c.Flags()
	f.given = s.Changed
	s.StringVar(&f.format, "format", "text", "text, json or gobench (for benchstat)")
	s.BoolVar(&f.asJSON, "json", false, "print JSON: the same as --format json")
}

// printer writes results in a format.
type printer func(io.Writer, []bench.Result) error

// printer reads the flags; what is wrong with them is a usage error.
func (f *resultFlags) printer() (printer, error) {
	if f.asJSON && f.given("format") && f.format != "json" {
		return nil, usagef("--json and --format %s: want one of them", f.format)
	}
	if f.asJSON {
		f.format = "json"
	}
	switch f.format {
	case "text":
		return bench.Text, nil
	case "json":
		return func(w io.Writer, r []bench.Result) error { return printJSON(w, r) }, nil
	case "gobench":
		return bench.GoBench, nil
	}
	return nil, usagef("unknown format %q: there are text, json, gobench", f.format)
}

// checkSave looks at a --save before anything is measured for it.
func checkSave(path string) error {
	if path == "" {
		return nil
	}
	if err := writable(path); err != nil {
		return &usageError{fmt.Errorf("--save: %w", err)}
	}
	return nil
}

// saveJSON writes results to a file.
func saveJSON(path string, list []bench.Result) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(printJSON(file, list), file.Close())
}

// timeFlags say how long is measured: for so many seconds in all, which rounds override, or for
// rounds with so many seconds of each way.
type timeFlags struct {
	seconds float64
	rounds  int
}

func (f *timeFlags) registerTotal(c *cobra.Command, what string) {
	s := c.Flags()
	s.Float64Var(&f.seconds, "seconds", 3, what+", baselines included")
	s.IntVar(&f.rounds, "rounds", 0, "measure that many rounds instead of --seconds")
}

func (f *timeFlags) registerSlices(c *cobra.Command) {
	s := c.Flags()
	s.Float64Var(&f.seconds, "seconds", 1, "time of each way in each round")
	s.IntVar(&f.rounds, "rounds", 3, "rounds")
}

// secondsMax is a day.
const secondsMax = 24 * 3600

func (f *timeFlags) checkTotal() error {
	if f.rounds < 0 {
		return usagef("--rounds %d: want 1 or more, or 0 for --seconds", f.rounds)
	}
	return f.checkSeconds()
}

func (f *timeFlags) checkSlices() error {
	if f.rounds < 1 || f.rounds > 1000 {
		return usagef("--rounds %d: want 1 to 1000", f.rounds)
	}
	return f.checkSeconds()
}

func (f *timeFlags) checkSeconds() error {
	if !(f.seconds > 0 && f.seconds <= secondsMax) {
		return usagef("--seconds %v: want more than 0, at most %d", f.seconds, secondsMax)
	}
	return nil
}

// time is --seconds.
func (f *timeFlags) time() time.Duration { return time.Duration(f.seconds * float64(time.Second)) }

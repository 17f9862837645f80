// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/bench"
)

// measuring stands around the measurements of a command.
type measuring struct {
	c      *cobra.Command
	before processors
	said   bool // it takes long, and what others do meanwhile is told, too
}

// saidFrom is how long a command takes at least that says so before it begins.
const saidFrom = 5 * time.Second

// startMeasuring says how long it takes, where that is long, and whether the machine is busy.
func startMeasuring(c *cobra.Command, about time.Duration) *measuring {
	if about >= saidFrom {
		line := fmt.Sprintf("%s takes about %v; Ctrl-C prints what was measured until then",
			c.CommandPath()[len("sluice "):], about.Round(time.Second))
		load, _ := os.ReadFile("/proc/loadavg") // a kernel that does not tell: no note
		if note := busyNote(string(load), runtime.NumCPU()); note != "" {
			line += "\n" + note
		}
		fmt.Fprintln(c.ErrOrStderr(), line)
	}
	return &measuring{c, readProcessors(), about >= saidFrom}
}

// print prints what was measured, also where an error or an interrupt ended the rest, and returns
// that error. That others disturbed it is told beside the figures, on the standard error.
func (m *measuring) print(write printer, list []bench.Result, err error) error {
	if len(list) == 0 {
		return err
	}
	note := othersNote(m.before, readProcessors())
	err = errors.Join(err, write(m.c.OutOrStdout(), list))
	if m.said && note != "" {
		fmt.Fprintln(m.c.ErrOrStderr(), note)
	}
	return err
}

// about is how long it takes to measure so many shapes: a program beside them takes as long again.
func (f *benchFlags) about(shapes int) time.Duration {
	switch {
	case f.rounds > 0:
		return 0
	case f.table && f.backend == rdmaName:
		shapes = (shapes + 1) * len(f.verbsLanes())
	case f.table:
		shapes = (shapes + 1) * len(f.lanes())
	}
	if f.beside() || f.backend == rdmaName {
		shapes *= 2
	}
	return time.Duration(shapes) * f.time()
}

// processors are the seconds that those of the machine have passed with something.
type processors struct{ all, used, stolen, own float64 }

// ticks is how many of /proc/stat are a second, on every machine (USER_HZ).
const ticks = 100

func readProcessors() (p processors) {
	text, _ := os.ReadFile("/proc/stat") // without it nothing is known, and nothing said
	line, _, _ := strings.Cut(string(text), "\n")
	for i, word := range strings.Fields(line) {
		n, err := strconv.ParseFloat(word, 64)
		if err != nil || i > 8 { // the name; guests, which are in user already
			continue
		}
		n /= ticks
		p.all += n
		switch i {
		case 1, 2, 3: // user, nice, system
			p.used += n
		case 8:
			p.stolen += n
		}
	}
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var u unix.Rusage
		if unix.Getrusage(who, &u) == nil {
			p.own += time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
		}
	}
	return p
}

// What is worth a note: a share of the machine's processors that others used, or that the host took
// away, and the least that clock ticks tell.
const (
	othersMost = 0.1
	stolenMost = 0.02
	leastTime  = 0.2 // s
)

// othersNote says what else the machine did between two looks, "" where that was little.
func othersNote(before, after processors) string {
	all := after.all - before.all
	stolen := after.stolen - before.stolen
	others := after.used - before.used - (after.own - before.own)
	var found []string
	if others > max(othersMost*all, leastTime) {
		found = append(found, fmt.Sprintf("others took %.0f %% of its processors", 100*others/all))
	}
	if stolen > max(stolenMost*all, leastTime) {
		found = append(found, fmt.Sprintf("the host gave it %.0f %% less (steal)", 100*stolen/all))
	}
	if len(found) == 0 {
		return ""
	}
	return "the machine was busy: " + strings.Join(found, ", ") + ": measure again when it is idle"
}

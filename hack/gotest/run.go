// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// notGate are the names of tests that are not the gate's.
const notGate = "^Test(Timed|Soak)"

// result is the result of one run of a test binary.
type result struct {
	ok              bool
	passed, skipped int
	failed          []string // tests that failed; empty if the process died without naming one
	broken          bool     // a promise was broken: the failure is final
	died            bool     // the process ended within a test, before the first, or as none does
	cut             bool     // the end of the time, or of this command, ended it
	parts           int      // of tests, that were skipped
	seeds           []string // by which a test chose
	begins, ends    map[string]time.Time
	wall            time.Duration
}

// invocation is one run of one test binary.
type invocation struct {
	p       *testPackage
	match   string                             // -test.run
	skip    string                             // -test.skip
	count   int                                // -test.count
	disturb func(context.Context, *os.Process) // what -stall and -quota ask for
}

// outlives is for how long a child that outlives the test may hold its output open.
var outlives = 10 * time.Second

// perform starts a test binary in its package's folder, reads what it says until it has ended, and
// prints what a reader needs: one line of a package that passed, all output of tests that failed.
// The process leads a group of its own, which is killed when ctx ends or the timeout is past, and
// with which those of its children end that it has left behind.
func (o *options) perform(whole context.Context, v invocation) result {
	// The binary's own timeout prints all goroutines; this one ends a process that is stopped.
	ctx, cancel := context.WithTimeout(whole, o.timeout+time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, v.p.binary, o.arguments(v)...)
	cmd.Dir = v.p.dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = outlives
	out, in := io.Pipe()
	log, logErr := os.Create(v.p.binary + ".log")
	to := io.Writer(in)
	if logErr == nil {
		defer log.Close()
		to = io.MultiWriter(in, log)
	}
	cmd.Stdout, cmd.Stderr = to, to
	began := time.Now()
	read := make(chan reading, 1)
	go func() { read <- readOutput(out) }()
	err := cmd.Start()
	if err == nil {
		disturbed, over := context.WithCancel(ctx)
		var disturbs sync.WaitGroup
		if v.disturb != nil {
			disturbs.Go(func() { v.disturb(disturbed, cmd.Process) })
		}
		err = cmd.Wait()
		over()
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		disturbs.Wait() // its control group goes once no process is in it
	}
	_ = in.Close()
	said := <-read
	r := said.result
	r.wall = time.Since(began)
	v.p.wall += r.wall
	if s := cmd.ProcessState; s != nil {
		v.p.processor += s.UserTime() + s.SystemTime()
		// Package testing ends with 0 or 1; all else is a crash, of TestMain maybe.
		r.died = s.ExitCode() != 0 && s.ExitCode() != 1
		killed, _ := s.Sys().(syscall.WaitStatus)
		r.cut = whole.Err() != nil && killed.Signaled() && killed.Signal() == syscall.SIGKILL
	}
	if why := r.unsound(err); why != "" {
		r.died = true
		fmt.Fprintf(o.out, "%s: %s\n", v.p.short(), why)
	}
	r.ok = err == nil && len(r.failed) == 0 && !r.died
	o.tell(v.p, &said, &r, err)
	return r
}

// unsound returns why a run says nothing of its tests, "" where it does.
func (r *result) unsound(err error) string {
	for name := range r.begins {
		if r.ends[name].Before(r.begins[name]) {
			return "the process ended in " + name
		}
	}
	if len(r.begins) == 0 {
		return "no test has begun"
	}
	if errors.Is(err, exec.ErrWaitDelay) {
		return fmt.Sprintf("a process that it left behind held its output for %v", outlives)
	}
	return ""
}

// arguments returns the arguments of a test binary.
func (o *options) arguments(v invocation) []string {
	return append([]string{"-test.v=test2json", "-test.paniconexit0",
		"-test.timeout=" + o.timeout.String(), "-test.count=" + fmt.Sprint(max(v.count, 1)),
		"-test.run=" + v.match, "-test.skip=" + v.skip}, o.args...)
}

// tell prints how a run has ended.
func (o *options) tell(p *testPackage, said *reading, r *result, err error) {
	if r.ok {
		fmt.Fprintf(o.out, "ok  \t%s\t%.3fs\n", p.path, r.wall.Seconds())
		return
	}
	for _, line := range said.kept {
		fmt.Fprintln(o.out, line)
	}
	fmt.Fprintf(o.out, "FAIL\t%s\t%.3fs (%v; all it said: %s.log)\n", p.path, r.wall.Seconds(),
		err, p.binary)
}

// reading is the state of readOutput.
type reading struct {
	result
	kept []string // the lines of tests that did not pass
	from int      // where of them those of the current test begin
}

// linesMax bounds what a failed package prints.
const linesMax = 2000

// marker stands before each line that is of package testing: it may follow one that a test, or a
// child of it, did not end, and no test prints it.
const marker = "\x16"

// race begins what the race detector prints. That the machine was late is no excuse for it.
const race = "WARNING: DATA RACE"

// verdict is the last line of a test.
var verdict = regexp.MustCompile(`^--- (PASS|FAIL|SKIP): (\S+)`)

// seed is how tests print what they chose by.
var seed = regexp.MustCompile(`seed[ =](\d+)`)

// readOutput follows what a test binary prints. It forgets the lines of a test that passed.
func readOutput(out io.Reader) reading {
	r := reading{result: result{begins: map[string]time.Time{}, ends: map[string]time.Time{}}}
	for lines := bufio.NewReader(out); ; {
		text, err := lines.ReadString('\n')
		for i, line := range strings.Split(strings.TrimSuffix(text, "\n"), marker) {
			if line != "" {
				r.addLine(line, i > 0)
			}
		}
		if err != nil {
			return r
		}
	}
}

// addLine looks at a line, which package testing has printed or something else.
func (r *reading) addLine(line string, framed bool) {
	r.broken = r.broken || strings.Contains(line, testkit.BrokenPromise) ||
		strings.Contains(line, race)
	if m := seed.FindStringSubmatch(line); m != nil && !slices.Contains(r.seeds, m[1]) {
		r.seeds = append(r.seeds, m[1])
	}
	name, ok := strings.CutPrefix(line, "=== RUN   ")
	if ok && framed && !strings.Contains(name, "/") {
		r.begins[name], r.from = time.Now(), len(r.kept)
	}
	r.kept = append(r.kept, line)
	m := verdict.FindStringSubmatch(line)
	switch {
	case m == nil || !framed:
	case strings.Contains(m[2], "/"): // a part, which its test's own verdict covers
		if m[1] != "FAIL" {
			r.kept = r.kept[:len(r.kept)-1]
		}
		if m[1] == "SKIP" {
			r.parts++
		}
	default:
		r.ends[m[2]] = time.Now()
		switch m[1] {
		case "PASS":
			r.passed++
		case "SKIP":
			r.skipped++
		case "FAIL":
			if !slices.Contains(r.failed, m[2]) {
				r.failed = append(r.failed, m[2])
			}
			r.from = len(r.kept)
		}
		r.kept = r.kept[:r.from]
	}
	if len(r.kept) > linesMax { // the beginning and the end are what tells most
		r.kept = slices.Delete(r.kept, linesMax/2, linesMax/2+1)
		if r.from > linesMax/2 {
			r.from--
		}
	}
}

// gate runs the packages side by side: of twice the processors' number of places a package that
// computes takes two, one that waits takes one. It begins with the longest that finds room.
func (o *options) gate(ctx context.Context, list []*testPackage) (end summary) {
	type ended struct {
		p *testPackage
		r result
	}
	room, done, waiting := 2*processors(), make(chan ended), slices.Clone(list)
	places := func(p *testPackage) int {
		if p.computes {
			return 2
		}
		return 1
	}
	for running := 0; len(waiting) > 0 && ctx.Err() == nil || running > 0; {
		i := slices.IndexFunc(waiting, func(p *testPackage) bool { return places(p) <= room })
		if i >= 0 && ctx.Err() == nil {
			p := waiting[i]
			waiting = slices.Delete(waiting, i, i+1)
			room -= places(p)
			running++
			go func() {
				done <- ended{p, o.perform(ctx, invocation{p: p, match: o.run, skip: notGate,
					count: o.count, disturb: o.disturbance(p, nil)})}
			}()
			continue
		}
		e := <-done
		room += places(e.p)
		running--
		end.add(e.p, e.r)
	}
	return end
}

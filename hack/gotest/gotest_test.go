// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// framed is text as package testing prints it: with a marker before each line of its own, and parts
// not indented.
func framed(text string) string {
	return regexp.MustCompile(`(?: {4})*(=== RUN|--- )`).ReplaceAllString(text, marker+"$1")
}

// binary is a program in the place of a test binary: its runs say what the texts say, in turn.
func binary(t *testing.T, texts ...string) *testPackage {
	t.Helper()
	dir := t.TempDir()
	for i, text := range texts {
		require.NoError(t, os.WriteFile(filepath.Join(dir, strings.Repeat("i", i+1)),
			[]byte(framed(text)), 0o600))
	}
	p := &testPackage{path: "some/package", dir: dir, tests: []string{"TestTimedA", "TestTimedB"},
		binary: filepath.Join(dir, "some.test")}
	require.NoError(t, os.WriteFile(p.binary, []byte(`#!/bin/sh
echo "$@" >>arguments
n=$(cat n 2>/dev/null)i
echo $n >n
cat $n
if grep -q LEAVES $n; then sleep 600 & echo $! >left; fi
if grep -q HANGS $n; then exec sleep 600; fi
if grep -q CRASH $n; then exit 2; fi
! grep -q FAIL $n
`), 0o700))
	return p
}

const (
	passes = "=== RUN   TestTimedA\n--- PASS: TestTimedA (0.1s)\n"
	fails  = "=== RUN   TestTimedA\n    a_test.go:7: late\n--- FAIL: TestTimedA (0.1s)\nFAIL\n"
	two    = fails + "=== RUN   TestTimedB\n--- FAIL: TestTimedB (0.1s)\nFAIL\n"
	broken = "=== RUN   TestTimedA\n    a_test.go:7: " + testkit.BrokenPromise +
		"bytes landed\n--- FAIL: TestTimedA (0.1s)\nFAIL\n"
	dies    = fails + "=== RUN   TestTimedB\nSIGSEGV: FAIL\n"
	exits   = passes + "=== RUN   TestTimedB\n    b_test.go:7: about to call exit(0)\n"
	leaves  = passes + "LEAVES a child\n"
	hangs   = "=== RUN   TestTimedA\nHANGS\n"
	crashes = fails + "CRASH of TestMain\n"
	races   = "=== RUN   TestTimedA\n" + race + "\n--- FAIL: TestTimedA (0.1s)\nFAIL\n"
	seeded  = "=== RUN   TestTimedA\n    seed 12: 5 actions\n    again with -a.seed=7, seed 12\n" +
		"--- PASS: TestTimedA (0.1s)\n"
	parted = "=== RUN   TestTimedA\n--- PASS: TestTimedA (0.1s)\n    --- SKIP: TestTimedA/x (0s)\n"
	// The first of two that failed stands behind lines that have no end.
	unended = "x=== RUN   TestTimedA\nx--- FAIL: TestTimedA (0.1s)\n=== RUN   TestTimedB\n" +
		"--- FAIL: TestTimedB (0.1s)\nFAIL\n"
)

// TestTriedAgain: a timed test is tried again on evidence alone.
func TestTriedAgain(t *testing.T) {
	for name, c := range map[string]struct {
		stands bool // the machine, all the time
		says   []string
		runs   int
		passes bool
	}{
		"it passes":                     {true, []string{passes}, 1, true},
		"it was late on a busy machine": {true, []string{fails, passes}, 2, true},
		"it was late twice":             {true, []string{fails, fails, passes}, 3, true},
		"it was late thrice":            {true, []string{fails, fails, fails, passes}, 3, false},
		"nothing stood still":           {false, []string{fails, passes}, 1, false},
		"a promise was broken":          {true, []string{broken, passes}, 1, false},
		"a promise was broken later":    {true, []string{fails, broken, passes}, 2, false},
		"the process died":              {true, []string{dies, passes}, 1, false},
		"it ended well in a test":       {true, []string{exits, passes}, 1, false},
		"no test has begun":             {true, []string{"ok\n", passes}, 1, false},
		"it ended with another status":  {true, []string{crashes, passes}, 1, false},
		"it left a process behind":      {true, []string{leaves, passes}, 1, false},
		"a race":                        {true, []string{races, passes}, 1, false},
		"a line without end":            {true, []string{unended, fails, fails, passes}, 4, false},
		"two tests":                     {true, []string{two, passes, passes}, 3, true},
		"more than may be late": {true, []string{two, passes, passes, two, passes, passes}, 4,
			false},
	} {
		t.Run(name, func(t *testing.T) {
			if c.says[0] == leaves {
				defer func(d time.Duration) { outlives = d }(outlives)
				outlives = 10 * time.Millisecond
			}
			m := &meter{}
			if c.stands {
				m.add(time.Now().Add(-time.Hour), 2*time.Hour)
			}
			p := binary(t, c.says...)
			o, end := options{tier: "timed", timeout: time.Minute, out: io.Discard}, summary{}
			list := []*testPackage{p}
			if len(c.says) == 6 {
				list = append(list, p)
			}
			o.round(t.Context(), m, list, &end)
			said, err := os.ReadFile(filepath.Join(p.dir, "arguments"))
			require.NoError(t, err)
			require.Equal(t, c.runs, strings.Count(string(said), "\n"), "%s", said)
			require.Equal(t, c.passes, len(end.failed) == 0, "%q", end.failed)
			if left, err := os.ReadFile(filepath.Join(p.dir, "left")); err == nil {
				awaitEnd(t, strings.TrimSpace(string(left)))
			}
		})
	}
}

// awaitEnd waits until a process is gone, or only the kernel's record of it is left.
func awaitEnd(t *testing.T, pid string) {
	t.Helper()
	require.Eventually(t, func() bool {
		stat, err := os.ReadFile("/proc/" + pid + "/stat")
		return err != nil || strings.Contains(string(stat), ") Z ")
	}, 30*time.Second, time.Millisecond)
}

// TestEndOfASoak: a test that the end cuts off has not failed, and one that crashed has. Of each
// other test it says the outcome, and the seeds to begin it again with.
func TestEndOfASoak(t *testing.T) {
	for says, c := range map[string]struct {
		limit  time.Duration
		failed int
		told   string
	}{
		hangs:   {time.Second, 0, `the time was over before 1 tests: \["some/package TestTimedA"\]`},
		crashes: {time.Minute, 1, `some/package TestTimedA: FAILED in \d+ s\n`},
		dies:    {time.Minute, 1, `some/package TestTimedA: FAILED in \d+ s\n`},
		seeded:  {time.Minute, 0, `some/package TestTimedA: passed in \d+ s, seeds 12 7\n`},
		parted:  {time.Minute, 0, `some/package TestTimedA: passed but for 1 parts that were skipped`},
	} {
		p, said := binary(t, says), &strings.Builder{}
		p.tests = p.tests[:1]
		o := options{tier: "soak", timeout: time.Minute, limit: c.limit, out: said}
		end := o.soak(t.Context(), []*testPackage{p})
		require.Len(t, end.failed, c.failed, "%q", says)
		require.Regexp(t, `(?m)^soak: `+c.told, said.String())
	}
}

// TestOutput: what is printed of a failed package are the tests that did not pass.
func TestOutput(t *testing.T) {
	r := readOutput(strings.NewReader(framed(`before
=== RUN   TestA
=== RUN   TestA/part
    a_test.go:1: boring
--- PASS: TestA (0.00s)
    --- PASS: TestA/part (0.00s)
=== RUN   TestB
=== RUN   TestB/part
    b_test.go:1: telling
--- FAIL: TestB (0.00s)
    --- FAIL: TestB/part (0.00s)
=== RUN   TestC
    c_test.go:1: not here
--- SKIP: TestC (0.00s)
=== RUN   TestD
panic: oh`) + "\n--- PASS: TestD (0.00s)"))
	require.Equal(t, []string{"TestB"}, r.failed)
	require.Equal(t, 1, r.passed)
	require.Equal(t, 1, r.skipped)
	require.Equal(t, []string{"before", "=== RUN   TestB", "=== RUN   TestB/part",
		"    b_test.go:1: telling", "--- FAIL: TestB (0.00s)", "--- FAIL: TestB/part (0.00s)",
		"=== RUN   TestD", "panic: oh", "--- PASS: TestD (0.00s)"}, r.kept)
	require.Contains(t, r.begins, "TestD")
	require.NotContains(t, r.ends, "TestD")
}

// TestTiers: each name belongs to one tier.
func TestTiers(t *testing.T) {
	for test, tier := range map[string]string{"TestA": "gate", "TestTimedA": "timed",
		"TestSoakA": "soak", "FuzzA": "gate", "ExampleTimed": "gate"} {
		for _, each := range []string{"gate", "timed", "soak"} {
			o := options{tier: each}
			require.Equal(t, each == tier, o.belongs(test), "%s %s", test, each)
		}
	}
	require.False(t, (&options{tier: "gate", run: "^TestB$/part"}).belongs("TestA"))
}

// TestShards: each test is in one shard.
func TestShards(t *testing.T) {
	var got []string
	for _, shard := range []string{"0/3", "1/3", "2/3"} {
		list := []*testPackage{{path: "b", tests: []string{"1", "2"}},
			{path: "a", tests: []string{"1", "2", "3"}}}
		list, err := (&options{shard: shard}).choose(list)
		require.NoError(t, err)
		for _, p := range list {
			for _, name := range p.tests {
				got = append(got, p.path+name)
			}
		}
	}
	require.ElementsMatch(t, []string{"a1", "a2", "a3", "b1", "b2"}, got)
	for _, wrong := range []string{"3/3", "-1/3", "1", "1/0"} {
		_, err := (&options{shard: wrong}).choose(nil)
		require.Error(t, err, wrong)
	}
}

// TestMeter: a stall counts for the tests that it touches.
func TestMeter(t *testing.T) {
	m, at := &meter{}, time.Now()
	m.add(at, standstill-1)
	require.Zero(t, m.longest(at.Add(-time.Hour), at.Add(time.Hour)))
	m.add(at, time.Second)
	require.Equal(t, time.Second, m.longest(at.Add(500*time.Millisecond), at.Add(time.Hour)))
	require.Zero(t, m.longest(at.Add(2*time.Second), at.Add(time.Hour)))
}

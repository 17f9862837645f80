// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/engine"
)

// What is compared: programs in C or Python and in Go, over shm, whose callers copy along. Each is
// a process of its own, and there are several of each, since the place of its memory makes a copy
// of 2,048 pages slower or faster for a process's whole life.
const (
	costPairs  = 5
	costRounds = 12 // of each pair, in turns: one, other, other, one
	costPosts  = 50 // of the largest shape, in a round
)

var costShapes = [3]struct {
	name string
	more int // posts for each of the largest shape's
}{{"2048x656B", 1}, {"2048x8B", 10}, {"64B", 100}}

// costProgram is the first argument of this test's program when it is the one in Go.
const costProgram = "cost"

// BenchmarkFromC reports what C adds to posting and waiting, in one call and in two.
func BenchmarkFromC(b *testing.B) {
	for _, how := range []string{"together", "apart"} {
		b.Run(how, func(b *testing.B) { benchmarkFrom(b, how, compile(b, "cost.c", "-O2")) })
	}
}

// BenchmarkFromPython does so with the package as hack/python-test has installed it.
func BenchmarkFromPython(b *testing.B) {
	python := "../../build/venv/bin/python"
	if _, err := os.Stat(python); err != nil {
		drivertest.SkipIfUnavailable(b, &driver.UnavailableError{Backend: "Python",
			Reason: err.Error(), Fix: "make wheel"})
	}
	for _, how := range []string{"together", "apart"} {
		b.Run(how, func(b *testing.B) { benchmarkFrom(b, how, python, "../python/tests/cost.py") })
	}
}

// benchmarkFrom reports medians over the pairs: of the median difference between rounds that
// were neighbours, and of the difference between the best rounds, which a busy machine disturbs
// least.
func benchmarkFrom(b *testing.B, how string, program ...string) {
	var added, best, direct, ratio [3][]float64
	for b.Loop() {
		for range costPairs {
			theirs, ours := costPair(b, how, program)
			for i := range costShapes {
				var differ, times []float64
				for round := range costRounds {
					differ = append(differ, theirs[i][round]-ours[i][round])
					times = append(times, theirs[i][round]/ours[i][round])
				}
				added[i] = append(added[i], median(differ))
				ratio[i] = append(ratio[i], median(times))
				best[i] = append(best[i], slices.Min(theirs[i])-slices.Min(ours[i]))
				direct[i] = append(direct[i], median(ours[i]))
			}
		}
	}
	for i, shape := range costShapes {
		b.ReportMetric(median(added[i]), shape.name+"-added-ns")
		b.ReportMetric(median(best[i]), shape.name+"-added-best-ns")
		b.ReportMetric(median(direct[i]), shape.name+"-Go-ns")
		b.ReportMetric(median(ratio[i]), shape.name+"-ratio")
	}
	b.ReportMetric(0, "ns/op")
}

// costPair measures by a program and by its twin in Go, in turns, and returns what each round took,
// by shape.
func costPair(b *testing.B, how string, program []string) (theirs, ours [3][]float64) {
	one, other := startCost(b, how, program...), startCost(b, how, os.Args[0], costProgram)
	for round := range costRounds {
		if round%2 == 0 {
			one.round(b)
			other.round(b)
		} else {
			other.round(b)
			one.round(b)
		}
		for i := range costShapes {
			theirs[i] = append(theirs[i], one.took[i])
			ours[i] = append(ours[i], other.took[i])
		}
	}
	one.end(b)
	other.end(b)
	return theirs, ours
}

// costProcess is a program that measures when it is told to.
type costProcess struct {
	c    *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	took [3]float64 // ns a post, in the last round
}

func startCost(b *testing.B, how string, program ...string) *costProcess {
	b.Helper()
	p := &costProcess{c: exec.Command(program[0], append(program[1:], fmt.Sprint(costRounds),
		fmt.Sprint(costPosts), how)...)}
	p.c.Stderr = os.Stderr
	out, err := p.c.StdoutPipe()
	if err == nil {
		p.in, err = p.c.StdinPipe()
	}
	if err == nil {
		err = p.c.Start()
	}
	if err != nil {
		b.Fatal(err)
	}
	p.out = bufio.NewReader(out)
	return p
}

func (p *costProcess) round(b *testing.B) {
	_, err := fmt.Fprintln(p.in)
	if err == nil {
		_, err = fmt.Fscanln(p.out, &p.took[0], &p.took[1], &p.took[2])
	}
	if err != nil {
		b.Fatal(err)
	}
}

func (p *costProcess) end(b *testing.B) {
	_ = p.in.Close()
	if err := p.c.Wait(); err != nil {
		b.Fatal(err)
	}
}

// costInGo is the twin of testdata/cost.c: the same arguments, and the same is printed. Go has
// no such thing as posting and waiting in one call.
func costInGo(args []string) {
	need := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	rounds, err := strconv.Atoi(args[0])
	need(err)
	posts, err := strconv.Atoi(args[1])
	need(err)
	list, end := threeTransfers(need, "shm")
	for _, t := range list {
		inGo(need, t, 10)
	}
	lines := bufio.NewReader(os.Stdin)
	for range rounds {
		if _, err := lines.ReadString('\n'); err != nil {
			break
		}
		var took [3]float64
		for i, shape := range costShapes {
			took[i] = inGo(need, list[i], posts*shape.more)
		}
		fmt.Printf("%.0f %.0f %.1f\n", took[0], took[1], took[2])
	}
	end()
}

// inGo posts and waits, in ns a post.
func inGo(need checker, t *engine.Transfer, posts int) float64 {
	start := time.Now()
	for range posts {
		need(t.Post())
		need(t.Wait(context.Background()))
	}
	return float64(time.Since(start).Nanoseconds()) / float64(posts)
}

func median(list []float64) float64 {
	slices.Sort(list)
	return list[len(list)/2]
}

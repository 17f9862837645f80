// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/sluicehq/sluice/backends"
	"github.com/sluicehq/sluice/backends/backendtest"
	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/engine"
)

// The shape of testdata/cost.c.
const (
	pagesCount  = 2048
	entryBytes  = 656
	strideBytes = 1024
)

// threeTransfers between two engines: 2,048 pages, as many of 8 bytes, and 64 bytes.
func threeTransfers(t testing.TB) (list [3]*engine.Transfer) {
	t.Helper()
	need := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	open := func(name string) (*engine.Engine, *engine.Region) {
		b, err := mem.New(mem.Config{})
		need(err)
		e, err := engine.Open(engine.Config{Name: name, Backends: []backends.Backend{b}})
		need(err)
		m, err := e.Alloc(pagesCount*strideBytes, engine.AllocOptions{})
		need(err)
		r, err := e.Register("data", m.Segment())
		need(err)
		t.Cleanup(func() {
			need(e.Close())
			need(m.Close())
		})
		return e, r
	}
	a, local := open("a")
	b, _ := open("b")
	d, err := b.Describe()
	need(err)
	p, err := a.Connect(context.Background(), d)
	need(err)
	m, err := p.Remote("data")
	need(err)
	pages := engine.Pages{Count: pagesCount, EntryLen: entryBytes, LocalStride: strideBytes, RemoteStride: strideBytes}
	for i := range uint32(pagesCount) {
		pages.Local, pages.Remote = append(pages.Local, i*7%pagesCount), append(pages.Remote, i*13%pagesCount)
	}
	for i := range list {
		list[i], err = a.NewTransfer(p, engine.Write, engine.Route{})
		need(err)
	}
	need(list[0].AddPages(local, m, pages))
	pages.EntryLen = 8
	need(list[1].AddPages(local, m, pages))
	need(list[2].Add(local, 0, m, 0, 64))
	return list
}

// postAndWait calls exported functions, whose C types a test cannot name.
func postAndWait[H ~uint64, D ~int64, F any, R ~int32](post, test func(H, *F) R, wait, both func(H, D, *F) R, h uint64, f *F) error {
	if code := post(H(h), f); code != 0 {
		return fmt.Errorf("post: %d", code)
	}
	if code := wait(H(h), D(time.Minute), f); code != 0 {
		return fmt.Errorf("wait: %d", code)
	}
	if code := both(H(h), D(time.Minute), f); code != 0 {
		return fmt.Errorf("post and wait: %d", code)
	}
	if code := test(H(h), f); code != 0 {
		return fmt.Errorf("test: %d", code)
	}
	return nil
}

// takeInto takes completions into room that it keeps.
func takeInto[T any](take func([]T) int) func() int {
	room := make([]T, 4)
	return func() int { return take(room) }
}

// TestNoAllocations: posting, waiting with a limit, testing, and taking completions.
func TestNoAllocations(t *testing.T) {
	owner := &openEngine{}
	for i, et := range threeTransfers(t) {
		tr := &transfer{of: owner, t: et}
		h, err := transfers.put(tr)
		if err != nil {
			t.Fatal(err)
		}
		tr.handle = h
		if err := et.OnDone(func() { owner.ended.add(tr) }); err != nil {
			t.Fatal(err)
		}
		take := takeInto(owner.ended.take)
		var failed error
		once := func() {
			if err := postAndWait(slgoPost, slgoTest, slgoWait, slgoPostAndWait, h, nil); err != nil {
				failed = err
			}
			if take() != 1 {
				failed = errors.New("not told of exactly one")
			}
		}
		once()
		if n := testing.AllocsPerRun(100, once); n != 0 || failed != nil {
			t.Errorf("transfer %d: %v allocations from post to completion, %v", i, n, failed)
		}
		transfers.drop(h)
	}
}

// TestLimit is used again only if it has not come.
func TestLimit(t *testing.T) {
	l := borrowLimit(time.Hour)
	if l.Err() != nil {
		t.Error("over at once")
	}
	l.giveBack()
	if again := borrowLimit(time.Millisecond); again != l {
		t.Error("a limit that had not come was not used again")
	}
	<-l.Done()
	if l.Err() != errOver {
		t.Errorf("a limit that has come says %v", l.Err())
	}
	l.giveBack()
	if next := borrowLimit(time.Hour); next == l || next.Err() != nil {
		t.Error("used a limit again that had come")
	}
}

// BenchmarkFromC posts and waits from a program in C and in Go, in turns, and reports what C
// adds. Most of the first is the copy, whose time is another in each process.
func BenchmarkFromC(b *testing.B) {
	for _, how := range []string{"together", "apart"} {
		b.Run(how, func(b *testing.B) { benchmarkFrom(b, how, compile(b, "cost.c", "-O2")) })
	}
}

// BenchmarkFromPython does so with the package as hack/python-test has installed it.
func BenchmarkFromPython(b *testing.B) {
	python := "../../build/venv/bin/python"
	if _, err := os.Stat(python); err != nil {
		backendtest.SkipIfUnavailable(b, &backends.UnavailableError{Backend: "Python", Reason: err.Error(), Fix: "make wheel"})
	}
	for _, how := range []string{"together", "apart"} {
		b.Run(how, func(b *testing.B) { benchmarkFrom(b, how, python, "../python/tests/cost.py") })
	}
}

func benchmarkFrom(b *testing.B, how string, program ...string) {
	const rounds, posts = 31, 100
	c := exec.Command(program[0], append(program[1:], fmt.Sprint(rounds), fmt.Sprint(posts), how)...)
	in, err := c.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := c.Start(); err != nil {
		b.Fatal(err)
	}
	list, lines := threeTransfers(b), bufio.NewReader(out)
	var ours, theirs [3][]float64
	for range rounds {
		var took [3]float64
		if _, err := fmt.Fprintln(in); err != nil {
			b.Fatal(err)
		}
		if _, err := fmt.Fscanln(lines, &took[0], &took[1], &took[2]); err != nil {
			b.Fatal(err)
		}
		for i, more := range []int{1, 10, 100} {
			theirs[i] = append(theirs[i], took[i])
			ours[i] = append(ours[i], inGo(b, list[i], posts*more))
		}
	}
	_ = in.Close()
	if err := c.Wait(); err != nil {
		b.Fatal(err)
	}
	for i, name := range []string{"2048x656B", "2048x8B", "64B"} {
		from, direct := median(theirs[i]), median(ours[i])
		b.ReportMetric(from-direct, name+"-added-ns")
		b.ReportMetric(direct, name+"-Go-ns")
		b.ReportMetric(from/direct, name+"-ratio")
	}
	b.ReportMetric(0, "ns/op")
}

// inGo is the same from Go, on a goroutine of its own, in ns a post.
func inGo(b *testing.B, t *engine.Transfer, posts int) float64 {
	start := time.Now()
	for range posts {
		if err := t.Post(); err != nil {
			b.Fatal(err)
		}
		if err := t.Wait(context.Background()); err != nil {
			b.Fatal(err)
		}
	}
	return float64(time.Since(start).Nanoseconds()) / float64(posts)
}

func median(list []float64) float64 {
	slices.Sort(list)
	return list[len(list)/2]
}

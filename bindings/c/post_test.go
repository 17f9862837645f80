// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/sluicehq/sluice/backends"
	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/engine"
)

// The shape of testdata/cost.c.
const (
	pagesCount  = 2048
	entryBytes  = 656
	strideBytes = 1024
)

// pairOfTransfers returns a large and a small transfer between two engines.
func pairOfTransfers(t testing.TB) (large, small *engine.Transfer) {
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
	large, err = a.NewTransfer(p, engine.Write, engine.Route{})
	need(err)
	need(large.AddPages(local, m, pages))
	small, err = a.NewTransfer(p, engine.Write, engine.Route{})
	need(err)
	need(small.Add(local, 0, m, 0, 64))
	return large, small
}

// postAndWait calls exported functions, whose C types a test cannot name.
func postAndWait[H ~uint64, D ~int64, F any, R ~int32](post, test func(H, *F) R, wait func(H, D, *F) R, h uint64, f *F) error {
	if code := post(H(h), f); code != 0 {
		return fmt.Errorf("post: %d", code)
	}
	if code := wait(H(h), D(time.Minute), f); code != 0 {
		return fmt.Errorf("wait: %d", code)
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
	large, small := pairOfTransfers(t)
	owner := &openEngine{}
	for name, et := range map[string]*engine.Transfer{"large": large, "small": small} {
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
			if err := postAndWait(slgoPost, slgoTest, slgoWait, h, nil); err != nil {
				failed = err
			}
			if take() != 1 {
				failed = errors.New("not told of exactly one")
			}
		}
		once()
		if n := testing.AllocsPerRun(100, once); n != 0 || failed != nil {
			t.Errorf("%s: %v allocations from post to completion, %v", name, n, failed)
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

// BenchmarkFromC posts and waits for 2,048 pages and for 64 bytes from a program in C and in Go,
// in turns, and reports what C adds.
func BenchmarkFromC(b *testing.B) {
	const rounds, posts = 15, 200
	c := exec.Command(compile(b, "cost.c", "-O2"), fmt.Sprint(rounds), fmt.Sprint(posts))
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
	large, small := pairOfTransfers(b)
	lines := bufio.NewReader(out)
	var ours, theirs [2][]float64
	for range rounds {
		var x, y float64
		if _, err := fmt.Fprintln(in); err != nil {
			b.Fatal(err)
		}
		if _, err := fmt.Fscanln(lines, &x, &y); err != nil {
			b.Fatal(err)
		}
		theirs[0], theirs[1] = append(theirs[0], x), append(theirs[1], y)
		ours[0], ours[1] = append(ours[0], inGo(b, large, posts)), append(ours[1], inGo(b, small, posts*100))
	}
	_ = in.Close()
	if err := c.Wait(); err != nil {
		b.Fatal(err)
	}
	for i, name := range []string{"pages", "64B"} {
		from, direct := median(theirs[i]), median(ours[i])
		b.ReportMetric(from, name+"-C-ns")
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

// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

const (
	pagesCount  = 2048
	entryBytes  = 656
	strideBytes = 1024
)

// threeTransfers between two engines over a backend: 2,048 pages, as many of 8 bytes, and 64 bytes.
func threeTransfers(t *testing.T, backend string) (list [3]*engine.Transfer) {
	need := func(err error) {
		t.Helper()
		require.NoError(t, err)
	}
	open := func(name string) (*engine.Engine, *engine.Region) {
		b, err := byname.Open(backend, nil)
		need(err)
		e, err := engine.Open(engine.Config{Name: name, Backends: []driver.Backend{b}})
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
	pages := engine.Pages{Count: pagesCount, EntryLen: entryBytes, LocalStride: strideBytes,
		RemoteStride: strideBytes}
	for i := range uint32(pagesCount) {
		pages.Local, pages.Remote = append(pages.Local, i*7%pagesCount),
			append(pages.Remote, i*13%pagesCount)
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
func postAndWait[H ~uint64, D ~int64, F any, R ~int32](post, test func(H, *F) R, wait,
	both func(H, D, *F) R, h uint64, f *F) error {
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

// movedTo has completions moved into room that it keeps, and returns how many.
func movedTo[T any](move func([]T) int) func() int {
	room := make([]T, 4)
	return func() int { return move(room) }
}

// TestNoAllocations: posting, waiting with a limit, testing, and taking completions.
func TestNoAllocations(t *testing.T) {
	for _, backend := range []string{"mem", "shm"} {
		t.Run(backend, func(t *testing.T) { noAllocations(t, backend) })
	}
}

func noAllocations(t *testing.T, backend string) {
	owner := &openEngine{}
	for i, et := range threeTransfers(t, backend) {
		tr := &transfer{of: owner, t: et}
		h, err := transfers.put(tr)
		require.NoError(t, err)
		tr.handle = h
		require.NoError(t, et.OnDone(func() { owner.ended.add(tr) }))
		completions := movedTo(owner.ended.moveTo)
		var failed error
		once := func() {
			if err := postAndWait(slgoPost, slgoTest, slgoWait, slgoPostAndWait, h,
				nil); err != nil {
				failed = err
			}
			if completions() != 1 {
				failed = errors.New("not told of exactly one")
			}
		}
		once()
		if n := testkit.AllocsPerRun(100, once); n != 0 || failed != nil {
			t.Errorf("transfer %d: %v allocations from post to completion, %v", i, n, failed)
		}
		transfers.drop(h)
	}
}

// TestLimit is used again only if it has not come.
func TestLimit(t *testing.T) {
	for len(freeDeadlines) > 0 { // What earlier tests gave back would come first.
		<-freeDeadlines
	}
	l := acquireDeadline(time.Hour)
	if l.Err() != nil {
		t.Error("over at once")
	}
	l.release()
	if again := acquireDeadline(time.Millisecond); again != l {
		t.Fatal("a limit that had not come was not used again")
	}
	<-l.Done()
	if l.Err() != errWaitOver {
		t.Errorf("a limit that has come says %v", l.Err())
	}
	l.release()
	if next := acquireDeadline(time.Hour); next == l || next.Err() != nil {
		t.Error("used a limit again that had come")
	}
}

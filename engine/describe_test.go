// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/allocs"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// describes fails the test unless the engine tells of these regions, in order, and each can be
// reached.
func describes(t *testing.T, e *Engine, want ...string) {
	t.Helper()
	reader := open(t, "reader")
	defer reader.Close()
	src := register(t, reader, "src", 4096)
	p := connect(t, reader, e)
	if got := p.Remotes(); !slices.Equal(got, want) {
		t.Fatalf("described %q, want %q", got, want)
	}
	self, err := e.Self()
	check(t, err)
	if got := self.Remotes(); !slices.Equal(got, want) {
		t.Fatalf("to itself %q, want %q", got, want)
	}
	for _, name := range want {
		tr := transfer(t, p, Read)
		check(t, tr.Add(src, 0, remote(t, p, name), 0, 64))
		run(t, tr)
		check(t, tr.Close())
	}
}

// TestDescribeFollowsWhatIsRegistered: what was described before is of no consequence.
func TestDescribeFollowsWhatIsRegistered(t *testing.T) {
	leak.Check(t, hostmem.InUse)
	e := open(t, "owner")
	describes(t, e)
	b := register(t, e, "b", 4096)
	describes(t, e, "b")
	register(t, e, "c", 4096)
	describes(t, e, "b", "c")
	register(t, e, "a", 4096) // not in order
	describes(t, e, "a", "b", "c")
	_, err := e.RegisterPrivate("bb", b.Segment())
	check(t, err)
	describes(t, e, "a", "b", "c")
	check(t, b.Close())
	describes(t, e, "a", "c")
	b, err = e.Register("b", b.Segment())
	check(t, err)
	describes(t, e, "a", "b", "c")
	if _, err := e.Register("b", b.Segment()); !errors.Is(err, ErrBusy) {
		t.Errorf("a name that is taken: %v", err)
	}
	describes(t, e, "a", "b", "c")
}

// TestDescribeAfterTheEpochHasEnded: a name that is registered again, on the same memory, has
// another token, and the old one opens nothing.
func TestDescribeAfterTheEpochHasEnded(t *testing.T) {
	e, reader := open(t, "owner"), open(t, "reader")
	r, src := register(t, e, "kv", 4096), register(t, reader, "src", 4096)
	old := connect(t, reader, e)
	for range 3 {
		seg := r.Segment()
		before, err := e.Describe()
		check(t, err)
		check(t, r.Close())
		r, err = e.Register("kv", seg)
		check(t, err)
		after, err := e.Describe()
		check(t, err)
		if slices.Equal(before, after) {
			t.Fatal("the description is that of the region that was closed")
		}
		check(t, old.Refresh(before))
		if err := readOnce(t, old, src); !errors.Is(err, ErrRevoked) &&
			!errors.Is(err, driver.ErrBadToken) {
			t.Errorf("what was described before the region was closed: %v", err)
		}
		check(t, old.Refresh(after))
		check(t, readOnce(t, old, src))
	}
}

// readOnce reads from the peer's region "kv", as it was described last.
func readOnce(t *testing.T, p *Peer, src *Region) error {
	t.Helper()
	tr := transfer(t, p, Read)
	defer tr.Close()
	if err := tr.Add(src, 0, remote(t, p, "kv"), 0, 64); err != nil {
		return err
	}
	check(t, tr.Post())
	return tr.Wait(context.Background())
}

// TestDescribeWhileOthersRegister: a list is never out of order and never with a hole, whoever
// looks.
func TestDescribeWhileOthersRegister(t *testing.T) {
	e := open(t, "owner")
	seg := register(t, e, "0", 4096).Segment()
	var ended sync.WaitGroup
	for w := range 4 {
		ended.Go(func() {
			for i := range 50 {
				r, err := e.Register(fmt.Sprintf("%d.%03d", w, i), seg)
				if err == nil && i%3 == 0 {
					err = r.Close()
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 100 {
		list := e.visible()
		if !slices.IsSortedFunc(list, func(a, b *Region) int {
			return strings.Compare(a.name, b.name)
		}) || slices.Contains(list, nil) {
			t.Fatal("the list is out of order")
		}
		if _, err := e.Describe(); err != nil {
			t.Error(err)
		}
	}
	ended.Wait()
	if n := len(e.visible()); n != 1+4*33 {
		t.Errorf("%d regions, want %d", n, 1+4*33)
	}
}

// TestDescribeAllocations: some for all, and none for each region.
func TestDescribeAllocations(t *testing.T) {
	e := open(t, "owner")
	whole := register(t, e, "whole", 512*64)
	for i := range 512 {
		part, err := whole.Segment().Slice(uint64(i)*64, 64, [16]byte{})
		check(t, err)
		_, err = e.Register(fmt.Sprint("part ", i), part)
		check(t, err)
	}
	if n := allocs.PerRun(10, func() {
		if _, err := e.Describe(); err != nil {
			t.Error(err)
		}
	}); n > 20 {
		t.Errorf("%v allocations for 513 regions", n)
	}
}

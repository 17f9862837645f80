// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

func TestTable(t *testing.T) {
	tab := table[int]{kind: kindLease}
	var handles []uint64
	for i := range 3 * chunkSlots {
		v := i
		h, err := tab.put(&v)
		if err != nil || h == 0 {
			t.Fatal(h, err)
		}
		handles = append(handles, h)
	}
	for i, h := range handles {
		if v, err := tab.get(h); err != nil || *v != i {
			t.Fatalf("handle %#x names %v, %v", h, v, err)
		}
	}
	if !tab.drop(handles[5]) || tab.drop(handles[5]) {
		t.Error("dropped not exactly once")
	}
	again, err := tab.put(new(int))
	if err != nil || again == handles[5] || again&(1<<indexBits-1) != handles[5]&(1<<indexBits-1) {
		t.Errorf("%#x after %#x: %v", again, handles[5], err)
	}
	if _, err := tab.get(handles[5]); err == nil || !strings.Contains(err.Error(), "was closed") {
		t.Errorf("a stale handle: %v", err)
	}
	if n := len(tab.dropAll(func(v *int) bool { return *v%2 == 1 })); n != 3*chunkSlots/2-1 {
		t.Errorf("dropped %d", n)
	}
	if n := testkit.AllocsPerRun(100, func() { _, _ = tab.get(handles[6]) }); n != 0 {
		t.Errorf("%v allocations in a look-up", n)
	}
}

func TestTableFull(t *testing.T) {
	tab := table[int]{kind: kindPeer}
	v := new(int)
	for range 1 << indexBits {
		if _, err := tab.put(v); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := tab.put(v); !errors.Is(err, engine.ErrFull) {
		t.Errorf("one more than there can be: %v", err)
	}
}

// TestTableRace looks handles up while their places change hands.
func TestTableRace(t *testing.T) {
	tab := table[uint64]{kind: kindRemote}
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 2000 {
				v := new(uint64)
				h, err := tab.put(v)
				if err != nil {
					t.Error(err)
					return
				}
				if got, err := tab.get(h); err != nil || got != v {
					t.Errorf("%#x names another: %v", h, err)
				}
				tab.drop(h)
				if _, err := tab.get(h); err == nil {
					t.Errorf("%#x is still there", h)
				}
			}
		})
	}
	all.Wait()
}

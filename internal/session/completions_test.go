// SPDX-License-Identifier: Apache-2.0

package session

import (
	"errors"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

func TestCompletions(t *testing.T) {
	var r Completions
	r.Init(3)
	broken := errors.New("broken")
	var got [8]driver.Completion
	for round := range uint64(5) { // the places are used again, in any turn
		for range 3 {
			require.True(t, r.Take(), "there is room, and Take reports none")
		}
		require.False(t, r.Take(), "Take reports a fourth place of three")
		r.GiveBack()
		if r.Pop(got[:]) != 0 || r.Taken() != 2 {
			t.Fatalf("%d are ready and %d taken, want 0 and 2", r.Ready(), r.Taken())
		}
		r.Push(10*round, nil)
		r.Push(10*round+1, broken)
		if r.Ready() != 2 || r.Pop(got[:0]) != 0 || r.Pop(got[:1]) != 1 || got[0].Tag != 10*round ||
			got[0].Err != nil {
			t.Fatalf("first completion %+v", got[0])
		}
		if r.Pop(got[:]) != 1 || got[0].Tag != 10*round+1 || got[0].Err != broken {
			t.Fatalf("second completion %+v", got[0])
		}
		if r.Ready() != 0 || r.Taken() != 0 {
			t.Fatalf("%d are ready and %d taken when all is popped", r.Ready(), r.Taken())
		}
	}
	for i := range r.list {
		if r.list[i].Err != nil {
			t.Error("an error that was popped is kept alive")
		}
	}
}

// TestRingTogether has completions pushed and popped by several goroutines: each arrives once.
func TestCompletionsTogether(t *testing.T) {
	const pushers, each, places = 4, 5000, 8
	var r Completions
	r.Init(places)
	var seen [pushers * each]int
	var all sync.WaitGroup
	for p := range uint64(pushers) {
		all.Go(func() {
			for i := range uint64(each) {
				for !r.Take() {
					runtime.Gosched()
				}
				r.Push(p*each+i, nil)
			}
		})
	}
	var mu sync.Mutex
	left := pushers * each
	for range 2 {
		all.Go(func() {
			var got [3]driver.Completion
			for {
				n := r.Pop(got[:])
				mu.Lock()
				for _, c := range got[:n] {
					seen[c.Tag]++
				}
				left -= n
				end := left == 0
				mu.Unlock()
				if end {
					return
				}
				if n == 0 {
					runtime.Gosched()
				}
			}
		})
	}
	all.Wait()
	for tag, n := range seen {
		require.EqualValues(t, 1, n, "tag %d has arrived times", tag)
	}
}

func TestLastWords(t *testing.T) {
	var l LastWords[int]
	if l.Disarm() || l.Arm() {
		t.Error("an empty list is armed, or has somebody")
	}
	l.Add(1)
	l.Add(2)
	if !l.Disarm() || l.Disarm() || !l.Arm() {
		t.Error("one wake-up for each Arm, and none is missed")
	}
	pending := l.Pending([]int{0})
	require.Equal(t, []int{0, 1, 2}, pending)
	l.Add(3)
	l.Drop(2)
	if got := l.Pending(nil); !slices.Equal(got, []int{3}) {
		t.Errorf("after two were told %v", got)
	}
}

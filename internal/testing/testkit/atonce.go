// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// OneSideSees calls left and right at the same instant, again and again, for half a second of
// rounds, and fails if both return false in one of them: neither saw what the other had written.
// after ends a round.
//
// Give it words of MemoryOutsideGo. The race detector makes of an atomic Store to memory that is
// not Go's own one that a Load may overtake, and such a pair fails within some ten thousand rounds,
// where there are two processors: one sees what it wrote in order.
func OneSideSees(t testing.TB, left, right func() bool, after func()) {
	t.Helper()
	var begun, ended atomic.Uint64 // rounds
	var rightSaw, stop atomic.Bool
	go func() {
		for n := uint64(1); ; n++ {
			for begun.Load() != n {
				if stop.Load() {
					return
				}
			}
			rightSaw.Store(right())
			ended.Store(n)
		}
	}()
	defer stop.Store(true)
	n := uint64(0)
	for end := time.Now().Add(time.Second / 2); time.Now().Before(end); {
		n++
		begun.Store(n)
		leftSaw := left()
		for ended.Load() != n {
			runtime.Gosched()
		}
		if !leftSaw && !rightSaw.Load() {
			t.Fatalf("round %d: neither side saw the other", n)
		}
		after()
	}
}

// MemoryOutsideGo is some pages of zeros that are not Go's own, for a test's time.
func MemoryOutsideGo(t testing.TB, n int) []byte {
	t.Helper()
	mem, err := syscall.Mmap(-1, 0, n, syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_SHARED|syscall.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Munmap(mem) })
	return mem
}

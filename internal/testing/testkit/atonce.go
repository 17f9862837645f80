// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// OneSideSees tests that of two goroutines, which each write a word and then read the other's, at
// least one sees what the other wrote. For half a second it runs rounds: it calls left and right at
// the same time, fails if both return false, and calls after.
//
// To show a store that should be ordered before the load behind it and is not, the words must lie
// in MemoryOutsideGo and the test run under the race detector. There the detector makes an atomic
// Store a plain one, which the processor may delay beyond the load. With two processors a wrong
// pair then fails within some ten thousand rounds; one processor sees its own writes in order.
func OneSideSees(t testing.TB, left, right func() bool, after func()) {
	t.Helper()
	var begun, ended atomic.Uint64 // numbers of rounds: begun by left's side, ended by right's
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

// MemoryOutsideGo returns n zeroed bytes outside the Go heap. They are unmapped when the test ends.
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

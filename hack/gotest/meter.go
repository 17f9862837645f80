// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// meter sees when the machine stands still. A thread on each processor sleeps for some milliseconds
// again and again; one that wakes late was kept off its processor, and so was every other thread.
type meter struct {
	mu     sync.Mutex
	stalls []stall
}

// stall is a time in which a processor, or the test's process, ran nothing.
type stall struct {
	from  time.Time
	lasts time.Duration
}

// tick is how long the meter's threads sleep.
const tick = 5 * time.Millisecond

// stallsMax bounds what the meter keeps: the oldest go first.
const stallsMax = 100_000

func startMeter(ctx context.Context) *meter {
	m := &meter{}
	var all unix.CPUSet
	if unix.SchedGetaffinity(0, &all) != nil {
		all.Set(0)
	}
	for cpu := range 1024 {
		if !all.IsSet(cpu) {
			continue
		}
		go func() {
			runtime.LockOSThread() // for good: the thread ends with its goroutine
			var only unix.CPUSet
			only.Set(cpu)
			_ = unix.SchedSetaffinity(0, &only) // else it is one thread more that may be late
			sleep := unix.NsecToTimespec(int64(tick))
			for ctx.Err() == nil {
				began := time.Now()
				_ = unix.Nanosleep(&sleep, nil)
				m.add(began, time.Since(began)-tick)
			}
		}()
	}
	return m
}

func (m *meter) add(from time.Time, lasts time.Duration) {
	if lasts < standstill {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.stalls) == stallsMax {
		m.stalls = append(m.stalls[:0], m.stalls[stallsMax/2:]...)
	}
	m.stalls = append(m.stalls, stall{from, lasts})
}

// longest returns the longest stall that touches a time.
func (m *meter) longest(from, to time.Time) (longest time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.stalls {
		if s.from.Before(to) && s.from.Add(s.lasts).After(from) {
			longest = max(longest, s.lasts)
		}
	}
	return longest
}

// processors is how many this process may use.
func processors() int { return runtime.GOMAXPROCS(0) }

// SPDX-License-Identifier: Apache-2.0

// Package testpoint has tests park a goroutine between a check and the act that relies on it. A
// point is known by its backend and what has just happened there, as "shm: announced". Without a
// test a point costs the load of one pointer.
package testpoint

import (
	"os"
	"runtime"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

var do atomic.Pointer[func(point string)]

// At is called by a goroutine that has come to a point.
func At(point string) {
	if do := do.Load(); do != nil {
		(*do)(point)
	}
}

// Set has all goroutines of the process call f at each point; nil ends that.
func Set(f func(point string)) {
	if f == nil {
		do.Store(nil)
		return
	}
	do.Store(&f)
}

// First has the first goroutine that comes to a point call f there; a nil f ends that.
func First(point string, f func()) {
	if f == nil {
		Set(nil)
		return
	}
	var came atomic.Bool
	Set(func(p string) {
		if p == point && !came.Swap(true) {
			f()
		}
	})
}

// StopProcess stops the process by SIGSTOP: the caller goes on after SIGCONT, and not before. A
// signal to the process as a whole would let it run on until another thread has taken that.
func StopProcess() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	_ = unix.Tgkill(os.Getpid(), unix.Gettid(), unix.SIGSTOP)
}

// Standing is the goroutine that Stand parks at one point.
type Standing struct {
	Came <-chan struct{} // closed once the goroutine stands there
	GoOn func()          // ends that, also before; it may be called again
}

// Stand has the first goroutine that comes to each point stand there until GoOn. The end of the
// test lets all go on: a test that fails would otherwise wait for ever in a Close that waits for
// them. So call it after what opens the backends.
func Stand(t interface{ Cleanup(func()) }, points ...string) []*Standing {
	all := make([]*Standing, len(points))
	stands := make(map[string]func(), len(points))
	for i, p := range points {
		came, goOn := make(chan struct{}), make(chan struct{})
		all[i] = &Standing{Came: came, GoOn: sync.OnceFunc(func() { close(goOn) })}
		var first sync.Once
		stands[p] = func() {
			mine := false
			if first.Do(func() { mine = true }); mine {
				close(came)
				<-goOn
			}
		}
	}
	t.Cleanup(func() {
		Set(nil)
		for _, s := range all {
			s.GoOn()
		}
	})
	Set(func(p string) {
		if stand := stands[p]; stand != nil {
			stand()
		}
	})
	return all
}

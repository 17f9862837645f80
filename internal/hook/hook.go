// SPDX-License-Identifier: Apache-2.0

// Package hook has tests park a goroutine between a check and the act that relies on it.
package hook

import (
	"sync"
	"sync/atomic"
)

// Of is what tests have goroutines do at the spots of a package; its zero value is nothing.
type Of[S comparable] struct{ do atomic.Pointer[func(S)] }

// At is called by a goroutine that has come to a spot.
func (h *Of[S]) At(s S) {
	if do := h.do.Load(); do != nil {
		(*do)(s)
	}
}

// Set has all goroutines call do at each spot; nil ends that.
func (h *Of[S]) Set(do func(S)) {
	if do == nil {
		h.do.Store(nil)
		return
	}
	h.do.Store(&do)
}

// First has the first goroutine that comes to a spot call f there; a nil f ends that.
func (h *Of[S]) First(where S, f func()) {
	var came atomic.Bool
	if f == nil {
		h.Set(nil)
		return
	}
	h.Set(func(s S) {
		if s == where && !came.Swap(true) {
			f()
		}
	})
}

// Standing is the goroutine that Stand parks at one spot.
type Standing struct {
	Came <-chan struct{} // closed once the goroutine stands there
	GoOn func()          // ends that, also before; it may be called again
}

// Stand has the first goroutine that comes to each spot stand there until GoOn. The end of the test
// lets all go on and ends the hook: a test that fails would otherwise wait for ever in a Close that
// waits for them. So call it after what opens the backends.
func (h *Of[S]) Stand(t interface{ Cleanup(func()) }, where ...S) []*Standing {
	all := make([]*Standing, len(where))
	stands := make(map[S]func(), len(where))
	for i, s := range where {
		came, goOn := make(chan struct{}), make(chan struct{})
		all[i] = &Standing{Came: came, GoOn: sync.OnceFunc(func() { close(goOn) })}
		var first sync.Once
		stands[s] = func() {
			mine := false
			if first.Do(func() { mine = true }); mine {
				close(came)
				<-goOn
			}
		}
	}
	t.Cleanup(func() {
		h.Set(nil)
		for _, s := range all {
			s.GoOn()
		}
	})
	h.Set(func(s S) {
		if stand := stands[s]; stand != nil {
			stand()
		}
	})
	return all
}

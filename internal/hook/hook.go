// SPDX-License-Identifier: Apache-2.0

// Package hook has tests park a goroutine between a check and the act that relies on it.
package hook

import "sync/atomic"

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

// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"testing"

	"github.com/sluicehq/sluice/internal/testing/leak"
)

// link returns the one that there is.
func (f *fakeNet) link() (only *fakeLink) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, l := range f.links {
		only = l
	}
	return only
}

// TestRemake asks an owner for a queue pair anew. When it answers, the old one is gone, also where
// the peer has no new one; and what came over it until then counts as seen. Otherwise the peer
// would write again what the owner's program was told of, and may have used for something else.
func TestRemake(t *testing.T) {
	leak.Check(t)
	near, far := openFakeBackend(t, Config{}), openFakeBackend(t, Config{})
	s := newStranger(t, far)
	s.say(helloTo(near, far, 1).encode())
	w, ok := s.hear().(*welcome)
	if !ok || len(w.pairs) != 1 || !w.pairs[0].there {
		t.Fatalf("welcome: %+v", w)
	}
	pair, owner := w.pairs[0].end.QueuePair, fakeOf(far).link()
	for i, there := range []bool{true, false, true} {
		owner.mu.Lock()
		owner.last = 1
		owner.mu.Unlock()
		s.say((&pairRequest{attempt: uint32(i + 1), there: there, end: someEnd(1)}).encode())
		a, ok := s.hear().(*pairReply)
		if !ok || a.attempt != uint32(i+1) || a.there != there {
			t.Fatalf("request %d: answered with %+v", i, a)
		}
		if a.seen != uint64(i+1) {
			t.Errorf("request %d: %d messages seen, want that which came last too: %d", i, a.seen,
				i+1)
		}
		if fakePairIsThere(pair) {
			t.Errorf("request %d: the owner has answered, and its queue pair is still there", i)
		}
		pair = a.end.QueuePair
	}
}

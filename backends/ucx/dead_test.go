// SPDX-License-Identifier: Apache-2.0

package ucx_test

import (
	"context"
	"os/exec"
	"testing"
	"time"

	"github.com/sluicehq/sluice/backends/ucx"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// onOneHost runs a test with two sides on this host, with nothing left behind.
func onOneHost(t *testing.T, grace time.Duration) *stage {
	t.Helper()
	leak.Check(t, hostmem.InUse)
	c := ucx.Config{Transports: "tcp", Devices: "lo", Grace: grace, Failure: grace}
	s := newStage(t, sideConfig{UCX: c}, (*exec.Cmd).Start)
	s.connect()
	return s
}

// TestTimedKilled kills a process that others move bytes from and to, and that does so
// itself. The next one is another backend with other memory; ours is what it was.
func TestTimedKilled(t *testing.T) {
	s := onOneHost(t, shortGrace)
	for range 2 {
		lease := s.run()
		begin := uptime()
		s.far.kill()
		s.soon("transfers ended", begin, s.ended(), 0)
		at, err := s.near.lastWord()
		if err != nil {
			t.Error(err)
		}
		s.soon("the last word came", begin, at, 0)
		s.revoke(lease)
		s.soon("the lease was revoked", begin, uptime(), 0)
		s.near.poison(inAll)
		s.late("near", s.near.watch(inAll, 300*time.Millisecond, 0))
		begin = uptime()
		if err := s.near.peer.Close(); err != nil {
			t.Error(err)
		}
		s.soon("the peer closed", begin, uptime(), 0)
		s.begin((*exec.Cmd).Start)
		s.connect()
	}
	s.revoke(s.run())
	s.part(shortGrace)
}

// TestTimedAbortFrozen aborts transfers with a process that was just stopped, with what
// both packages have as their defaults.
func TestTimedAbortFrozen(t *testing.T) {
	s := onOneHost(t, 0)
	s.run()
	begin := uptime()
	s.far.freeze()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	results := make(chan error, pieces)
	for _, tr := range s.near.flood.list {
		go func() { results <- tr.Abort(ctx) }()
	}
	for range pieces {
		if err := <-results; err != nil {
			t.Errorf("abort: %v", err)
		}
	}
	s.soon("aborted", begin, uptime(), 2*time.Second)
	s.ended()
	s.near.poison(inSrc)
	s.far.poisonKV()
	s.far.thaw()
	s.untouched(inSrc, inKV, 500*time.Millisecond)
	s.part(6 * time.Second)
	s.connect()
	s.revoke(s.near.lease)
	lease := s.run()
	if err := lease.Revoke(t.Context()); err != nil {
		t.Error(err)
	}
	s.part(6 * time.Second)
}

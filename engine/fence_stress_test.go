// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"bufio"
	"cmp"
	"context"
	"encoding/hex"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestTimedFenceStress has another process write over leases, and this one write there. The other
// is stopped at random. Each lease is revoked and each transfer aborted at any moment; then its
// memory has other bytes, the process goes on, and they must stay. Registrations, imports and
// descriptions go on beside.
func TestTimedFenceStress(t *testing.T) {
	fenceStressOverAll(t, 1, 12, 0)
}

// TestSoakFenceStress goes on over each backend for -drivertest.stress, or half a minute, and
// -drivertest.seed repeats a run's choices.
func TestSoakFenceStress(t *testing.T) {
	seed := stressFlag("seed").(uint64)
	if seed == 0 {
		seed = rand.Uint64()
	}
	long := stressFlag("stress").(time.Duration)
	fenceStressOverAll(t, seed, math.MaxInt, cmp.Or(long, 30*time.Second))
}

// fenceStressOverAll does so many rounds of each slot, or ends after long if that is not 0.
func fenceStressOverAll(t *testing.T, seed uint64, rounds int, long time.Duration) {
	for _, backend := range []string{"shm", "tcp", "ucx"} {
		t.Run(backend, func(t *testing.T) { fenceStress(t, backend, seed, rounds, long) })
	}
}

func stressFlag(name string) any {
	return flag.Lookup("drivertest." + name).Value.(flag.Getter).Get()
}

func fenceStress(t *testing.T, backend string, seed uint64, rounds int, long time.Duration) {
	b, err := stressBackend(backend)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	require.NoError(t, b.Close())
	s := newStressOwner(t, backend, seed)
	ends := time.Now().Add(long)
	var all, stopper sync.WaitGroup
	for slot := range stressSlots {
		act := s.revokeOne
		if slot >= stressSlots/2 {
			act = s.abortOne
		}
		rng := rand.New(rand.NewPCG(seed, uint64(slot)))
		all.Go(func() {
			for n := 0; n < rounds && (long == 0 || time.Now().Before(ends)) && !t.Failed(); {
				if act(slot, rng) {
					n++
				}
			}
		})
	}
	stop := make(chan struct{})
	stopper.Go(func() { s.freeze(rand.New(rand.NewPCG(seed, 1<<32)), stop) })
	stopper.Go(func() {
		if err := s.churn(stop); err != nil {
			t.Error(err)
		}
	})
	all.Wait()
	close(stop)
	stopper.Wait()
	t.Logf("seed %d: %d leases revoked, %d transfers aborted, of which %d succeeded, %d "+
		"stops, %d dials",
		seed, s.count.revoked, s.count.aborted, s.count.succeeded, s.count.stops, s.count.dials)
	if !t.Failed() {
		require.Positive(t, s.count.revoked*s.count.aborted*s.count.stops)
	}
}

// stressOwner is this process's part.
type stressOwner struct {
	*stressSide
	t       testing.TB
	backend string
	socket  string
	process *os.Process
	input   io.Writer
	answers [stressSlots]chan int // of the other process, by slot

	still sync.RWMutex // held while the process must not be stopped

	mu    sync.Mutex // guards what follows
	peer  *engine.Peer
	count struct{ revoked, aborted, succeeded, stops, dials int }
}

func newStressOwner(t testing.TB, backend string, seed uint64) *stressOwner {
	s := &stressOwner{t: t, backend: backend, socket: filepath.Join(t.TempDir(), "s")}
	for i := range s.answers {
		s.answers[i] = make(chan int, 1)
	}
	cmd := exec.Command(os.Args[0], "-stress-at", backend+":"+s.socket)
	cmd.Stderr = os.Stderr
	input, err := cmd.StdinPipe()
	require.NoError(t, err)
	output, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = input.Close()
		_ = cmd.Process.Kill() // frozen or not
		_ = cmd.Wait()
	})
	s.process, s.input = cmd.Process, input
	lines := bufio.NewScanner(output)
	require.True(t, lines.Scan())
	require.Equal(t, "listens", lines.Text())
	go s.hear(lines)
	s.stressSide, err = newStressSide(backend, "owner", nil)
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := s.e.Close(); err != nil {
			t.Errorf("close the engine (seed %d): %v", seed, err)
		}
		_ = s.memory.Close()
	})
	return s
}

// hear deals out what the other process says.
func (s *stressOwner) hear(lines *bufio.Scanner) {
	for lines.Scan() {
		var what string
		var slot, n int
		_, _ = fmt.Sscan(lines.Text(), &what, &slot, &n)
		if what == "broken" {
			s.t.Errorf("the other process: %s", lines.Text())
			continue
		}
		s.answers[slot] <- n
	}
}

// ask has the other process do something for a slot and returns its answer.
func (s *stressOwner) ask(what string, slot int, value byte, token string) int {
	fmt.Fprintln(s.input, what, slot, value, token)
	return s.answer(slot)
}

func (s *stressOwner) answer(slot int) int {
	select {
	case n := <-s.answers[slot]:
		return n
	case <-time.After(time.Minute):
		s.t.Errorf("slot %d: the other process does not answer", slot)
		return 0
	}
}

// alive returns a Peer that is not lost, as far as is known.
func (s *stressOwner) alive() *engine.Peer {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.peer != nil && rand.IntN(64) == 0 { // all that is under way over it ends
		if err := s.peer.Close(); err != nil {
			s.t.Errorf("close a peer: %v", err)
		}
		s.peer = nil
	}
	if s.peer != nil {
		select {
		case <-s.peer.Lost():
			if err := s.peer.Close(); err != nil {
				s.t.Errorf("close a peer: %v", err)
			}
			s.peer = nil
		default:
			return s.peer
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if p, err := s.e.Dial(ctx, "unix", s.socket); err == nil {
		s.peer = p
		s.count.dials++
	}
	return s.peer
}

// freeze stops the other process at random, and lets it go on.
func (s *stressOwner) freeze(rng *rand.Rand, stop <-chan struct{}) {
	nap := func(most int) { time.Sleep(time.Duration(rng.IntN(most)) * time.Microsecond) }
	for stopped := false; ; stopped = true { // once at least
		select {
		case <-stop:
			if stopped {
				return
			}
		default:
		}
		nap(10_000)
		s.still.Lock()
		if err := testkit.Freeze(s.process); err != nil {
			s.t.Errorf("stop the other process: %v", err)
		}
		if most := 20_000; rng.IntN(16) > 0 {
			nap(most)
		} else {
			nap(20 * most) // longer than any Grace
		}
		if err := testkit.Thaw(s.process); err != nil {
			s.t.Errorf("let it go on: %v", err)
		}
		s.still.Unlock()
		s.mu.Lock()
		s.count.stops++
		s.mu.Unlock()
	}
}

// revokeOne leases a slot, has the other process write there, and revokes.
func (s *stressOwner) revokeOne(slot int, rng *rand.Rand) (done bool) {
	if s.alive() == nil {
		return false
	}
	l, err := s.region.Lease(uint64(slot)*stressPart, stressPart, engine.LeaseOptions{})
	if err != nil {
		s.t.Errorf("lease: %v", err)
		return false
	}
	fmt.Fprintln(s.input, "move", slot, 0, hex.EncodeToString(l.Token()))
	time.Sleep(time.Duration(rng.IntN(8_000)) * time.Microsecond)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := l.Revoke(ctx); err != nil {
		s.t.Errorf("revoke: %v", err)
	}
	value := byte(rng.IntN(0x80))
	paint(s.part(slot), value)
	s.answer(slot) // it was running, and writes no more
	if n := strays(s.part(slot), value); n > 0 {
		testkit.ErrorBroken(s.t, "slot %d: %d bytes landed after Revoke", slot, n)
	}
	s.mu.Lock()
	s.count.revoked++
	s.mu.Unlock()
	return true
}

// abortOne writes to the other process, and aborts. Over tcp the owner lands what it is copying
// when it is stopped (docs/promises.md), so there it runs meanwhile.
func (s *stressOwner) abortOne(slot int, rng *rand.Rand) (done bool) {
	p := s.alive()
	if p == nil {
		return false
	}
	if s.backend != "shm" {
		s.still.RLock()
	}
	ended := s.writeAndAbort(p, slot, rng)
	if s.backend != "shm" {
		s.still.RUnlock()
	}
	if !ended {
		return false
	}
	value := byte(rng.IntN(0x80))
	s.ask("paint", slot, value, "")
	time.Sleep(time.Duration(rng.IntN(3_000)) * time.Microsecond)
	if n := s.ask("look", slot, value, ""); n > 0 {
		testkit.ErrorBroken(s.t, "slot %d: %d bytes landed after Abort", slot, n)
	}
	s.mu.Lock()
	s.count.aborted++
	s.mu.Unlock()
	return true
}

func (s *stressOwner) writeAndAbort(p *engine.Peer, slot int, rng *rand.Rand) (ended bool) {
	m, err := p.Remote("region")
	if err != nil {
		s.t.Errorf("find the region: %v", err)
		return false
	}
	t, err := s.e.NewTransfer(p, engine.Write, engine.Route{})
	if err != nil {
		s.t.Errorf("new transfer: %v", err)
		return false
	}
	defer t.Close()
	paint(s.part(slot), byte(0x80+slot))
	piece := uint64(1) << (6 + rng.IntN(12))
	for off := uint64(slot) * stressPart; off+piece <= uint64(slot+1)*stressPart; off += 2 * piece {
		if t.Add(s.region, off, m, off, piece) != nil {
			return false // lost
		}
	}
	if t.Post() != nil {
		return false
	}
	if rng.IntN(2) == 0 {
		time.Sleep(time.Duration(rng.IntN(200)) * time.Microsecond)
	}
	if err := t.Abort(context.Background()); err != nil {
		s.t.Errorf("abort: %v", err)
		return false
	}
	if t.Err() == nil {
		s.mu.Lock()
		s.count.succeeded++
		s.mu.Unlock()
	}
	return true
}

// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// TestSleeperBesidePoller has one goroutine sleep and another one poll, which takes all
// completions: the sleeper must be woken by each that comes after it has armed.
func TestSleeperBesidePoller(t *testing.T) { sleepBesidePoller(t, 200) }

// TestSoakSleeperBesidePoller is TestSleeperBesidePoller for longer.
func TestSoakSleeperBesidePoller(t *testing.T) { sleepBesidePoller(t, 1500) }

func sleepBesidePoller(t *testing.T, rounds int64) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		const size = 64 << 10
		cfg.Depth = 4
		f := newFile(t, t.TempDir(), size)
		if _, err := f.WriteAt(make([]byte, size), 0); err != nil {
			// blocks, so that the disk has to answer
			t.Fatal(err)
		}
		require.NoError(t, f.Sync())
		r := newRig(t, cfg, fileSegment(f, size), size)
		var polling sync.WaitGroup
		var stop atomic.Bool
		var taken atomic.Int64
		polling.Go(func() {
			for !stop.Load() {
				n, err := r.b.Poll(r.done[:])
				if err != nil {
					t.Errorf("poll: %v", err)
					return
				}
				taken.Add(int64(n))
				runtime.Gosched()
			}
		})
		defer func() {
			stop.Store(true)
			polling.Wait()
		}()
		for round := range rounds {
			n := uint64(4096) // of every third round more than the table holds at once
			if round%3 == 0 {
				n = size
			}
			if _, err := r.b.Arm(); err != nil {
				t.Fatal(err)
			}
			descs := []driver.Desc{{Len: n/2 - 1, LocalKey: r.local, RemoteKey: r.remote},
				{Local: n / 2, Remote: n / 2, Len: n / 2, LocalKey: r.local, RemoteKey: r.remote}}
			op := [...]driver.Op{driver.Read, driver.Write}[round/3%2]
			require.NoError(t, r.p.Submit(uint64(round), &driver.Batch{Op: op, Descs: descs}))
			poll := [1]unix.PollFd{{Fd: int32(r.b.FD()), Events: unix.POLLIN}}
			for end := time.Now().Add(20 * time.Second); poll[0].Revents == 0; {
				if _, err := unix.Poll(poll[:], 1000); err != nil && err != unix.EINTR {
					t.Fatal(err)
				}
				if poll[0].Revents == 0 && time.Now().After(end) {
					stacks := make([]byte, 1<<20)
					t.Fatalf(
						"round %d: %d completions were taken and the sleeper was not woken\n%s",
						round, taken.Load(), stacks[:runtime.Stack(stacks, true)])
				}
			}
			for end := time.Now().Add(20 * time.Second); taken.Load() <= round; runtime.Gosched() {
				require.False(t, time.Now().After(end), "round %d: no completion", round)
			}
			var drained [8]byte
			_, _ = unix.Read(r.b.FD(), drained[:])
		}
	})
}

// TestBellsOff turns the kernel's bells off right after a landing that the kernel was to tell of.
// It may find them off before it has told, so the sleeper is woken from here.
func TestBellsOff(t *testing.T) {
	f := newFile(t, t.TempDir(), 4096)
	r := newRig(t, Config{Path: PathRing}, fileSegment(f, 4096), 4096)
	g := r.b.ring
	_, err := r.b.Arm()
	require.NoError(t, err)
	r.b.core.Mu.Lock()
	require.True(t, g.bells)
	g.armed.Store(false) // as Reap does
	g.rung = true
	g.flying++ // another request, of which the keeper is to look after
	g.Listen(true)
	g.flying--
	r.b.core.Mu.Unlock()
	g.Kick()
	require.True(t, r.b.core.Event.Drain())
}

// TestBellsOn has a completion come between two looks, while the kernel's bells are off: the
// sleeper is woken when they are on again.
func TestBellsOn(t *testing.T) {
	f := newFile(t, t.TempDir(), 4096)
	r := newRig(t, Config{Path: PathRing}, fileSegment(f, 4096), 4096)
	g := r.b.ring
	_, err := r.b.Arm()
	require.NoError(t, err)
	r.b.core.Mu.Lock()
	g.flying++
	g.Listen(true)
	g.flying--
	require.False(t, g.bells)
	e := g.nextEntry()
	e.opcode, e.fd, e.userData = opNop, -1, cancelTag
	g.publish()
	for !g.Pending() {
		g.enter(g.sq.tail.Load()-g.sq.head.Load(), 1)
	}
	g.Listen(false)
	require.True(t, g.bells)
	r.b.core.Mu.Unlock()
	g.Kick()
	require.True(t, r.b.core.Event.Drain())
}

// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

func memBackend(t *testing.T) []driver.Backend {
	t.Helper()
	b, err := mem.New(mem.Config{})
	require.NoError(t, err)
	return []driver.Backend{b}
}

func loop(t *testing.T, s Shape) Link {
	t.Helper()
	leak.Check(t, hostmem.InUse)
	side, l, err := Loop(memBackend(t), "mem", s.LocalBytes(), s.RemoteBytes(), BackendMemory)
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := side.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// TestRunMovesThePieces: after a run, every piece is at its place on the other
// side, and no byte beside them has changed.
func TestRunMovesThePieces(t *testing.T) {
	for _, s := range []Shape{
		{Op: driver.Write, Size: 100, Batch: 5, Threads: 2},
		{Op: driver.Write, Size: 656, Batch: 16, Pages: true, Spread: 1 << 20, Threads: 1},
	} {
		l := loop(t, s)
		local := l.Local.Bytes()
		for i := range local {
			local[i] = byte(i%250 + 1)
		}
		r, err := Run(t.Context(), l, s, Options{Rounds: patterns, Slice: time.Millisecond})
		require.NoError(t, err)
		if r.Backend != "mem" || r.GBps <= 0 || r.Ops < patterns || len(r.Baselines) != 2 ||
			r.Ratio <= 0 || r.P99us < r.P50us {
			t.Errorf("%+v", r)
		}
		remote := make([]byte, s.ScatteredBytes())
		if _, err := l.Remote.ReadAt(remote, 0); err != nil {
			t.Fatal(err)
		}
		pieces := map[uint64]bool{} // lists may share places
		for _, p := range s.plans() {
			for _, places := range p.places {
				for _, slot := range places {
					at := p.scattered + uint64(slot)*s.stride()
					pieces[at] = true
					if remote[at] == 0 || remote[at+s.Size-1] == 0 {
						t.Fatalf("%+v: no piece at %d", s, at)
					}
				}
			}
		}
		for at := range pieces {
			clear(remote[at : at+s.Size])
		}
		for i, b := range remote {
			if b != 0 {
				t.Fatalf("%+v: byte %d lies outside all pieces and was written", s, i)
			}
		}
	}
}

// TestRunGathers: the places are the initiator's, and come one behind the other.
func TestRunGathers(t *testing.T) {
	s := Shape{Op: driver.Write, Size: 656, Batch: 16, Pages: true, Gather: true, Spread: 1 << 20,
		Threads: 1}
	l := loop(t, s)
	local := l.Local.Bytes()
	for at := uint64(0); at < uint64(len(local)); at += s.Size {
		binary.LittleEndian.PutUint32(local[at:], uint32(at/s.Size))
	}
	r, err := Run(t.Context(), l, s, Options{Rounds: 3, Slice: time.Millisecond})
	if err != nil || !r.Gather || r.Ops < 3 || len(r.Baselines) != 2 {
		t.Fatalf("%+v, %v", r, err)
	}
	remote := make([]byte, s.RemoteBytes())
	if _, err := l.Remote.ReadAt(remote, 0); err != nil {
		t.Fatal(err)
	}
	p := s.plans()[0]
	for j := range s.Batch {
		got, ok := binary.LittleEndian.Uint32(remote[uint64(j)*s.Size:]), false
		for _, places := range p.places {
			ok = ok || places[j] == got
		}
		if !ok {
			t.Fatalf("entry %d is that of place %d, which no list has there", j, got)
		}
	}
	if s.Pages = false; !errors.Is(s.Check(), ErrShape) {
		t.Error("gathered pieces that are no pages are taken")
	}
}

func TestRunRefusesABadShape(t *testing.T) {
	if _, err := Run(t.Context(), Link{}, Shape{}, Options{}); !errors.Is(err, ErrShape) {
		t.Errorf("error %v", err)
	}
}

func TestRunEndsWithItsContext(t *testing.T) {
	s := Shape{Op: driver.Read, Size: 1, Batch: 1, Threads: 1}
	l := loop(t, s)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := Run(ctx, l, s, Options{Time: time.Hour, Slice: time.Millisecond}); !errors.Is(err,
		context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
}

// linked returns both directions between two engines.
func linked(t *testing.T) (there, back Link) {
	t.Helper()
	var sides [2]*Side
	for i := range sides {
		var err error
		sides[i], err = OpenSide(engine.Config{Backends: memBackend(t)}, 4096,
			BackendMemory)
		require.NoError(t, err)
		t.Cleanup(func() { sides[i].Close() })
	}
	link := func(from, to *Side) Link {
		description, err := to.Engine.Describe()
		require.NoError(t, err)
		l := Link{Engine: from.Engine, Local: from.Region}
		l.Peer, err = from.Engine.Connect(t.Context(), description)
		require.NoError(t, err)
		l.Remote, err = l.Peer.Remote(RegionName)
		require.NoError(t, err)
		return l
	}
	return link(sides[0], sides[1]), link(sides[1], sides[0])
}

const few = 20

func TestStampsArrive(t *testing.T) {
	there, back := linked(t)
	sent := make(chan error, 1)
	go func() { sent <- SendStamps(t.Context(), there, 64, few, 100*time.Microsecond) }()
	s, err := ReceiveStamps(t.Context(), back.Engine, few)
	err = errors.Join(err, <-sent)
	require.NoError(t, err)
	if s.Count() != few || s.Percentile(1) <= 0 || s.Percentile(100) > time.Minute {
		t.Errorf("%d stamps, %v to %v old", s.Count(), s.Percentile(1), s.Percentile(100))
	}
}

func TestPingPong(t *testing.T) {
	there, back := linked(t)
	sent := make(chan error, 1)
	go func() { sent <- Pong(t.Context(), back, 64, few) }()
	s, err := PingPong(t.Context(), there, 64, few)
	if err = errors.Join(err, <-sent); err != nil || s.Count() != few {
		t.Errorf("%v, %v", s, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := PingPong(ctx, there, 64, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a ping that nobody answers: %v", err)
	}
}

func TestWritePing(t *testing.T) {
	there, back := linked(t)
	for range 3 { // what landed before is no answer
		begun, sent := make(chan error, 1), make(chan error, 1)
		go func() {
			sent <- WritePong(t.Context(), back, 8, few, func() error { begun <- nil; return nil })
		}()
		<-begun
		s, err := WritePing(t.Context(), there, 8, few)
		if err = errors.Join(err, <-sent); err != nil || s.Count() != few || s.Percentile(1) <= 0 {
			t.Errorf("%v, %v", s, err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := WritePing(ctx, there, 8, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a ping that nobody answers: %v", err)
	}
	if _, err := WritePing(ctx, there, 12, 1); !errors.Is(err, ErrShape) {
		t.Errorf("12 bytes: %v", err)
	}
}

func TestSockets(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	sent := make(chan error, 1)
	go func() {
		sent <- errors.Join(SendSocketStamps(t.Context(), a, 64, few, time.Microsecond),
			SocketPong(t.Context(), a, 64, few))
	}()
	s, err := ReceiveSocketStamps(t.Context(), b, 64, few)
	require.NoError(t, err)
	p, err := SocketPingPong(t.Context(), b, 64, few)
	if err = errors.Join(err, <-sent); err != nil || s.Count() != few || p.Count() != few {
		t.Errorf("%v, %v, %v", s, p, err)
	}
	r := NotifyResult("shm", "notify", 64, s, p)
	if r.Baseline.Name != "unix-socket" || r.Ratio <= 0 || r.OpsPerS <= 0 {
		t.Errorf("%+v", r)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := ReceiveSocketStamps(ctx, b, 64, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("nobody sends: %v", err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/engine"
)

// A message of this measurement is a stamp (CLOCK_MONOTONIC, which all processes
// of a machine share, in ns) or, in a round trip, a number.
const stampLen = 8

func clock() (int64, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0, fmt.Errorf("read the clock: %w", err)
	}
	return ts.Nano(), nil
}

// noted is a small write with a message behind it.
type noted struct {
	t   *engine.Transfer
	msg [stampLen]byte
}

func newNoted(l *Link, size uint64) (*noted, error) {
	t, err := l.Engine.NewTransfer(l.Peer, engine.Write, engine.Route{Only: l.Only})
	if err != nil {
		return nil, err
	}
	n := &noted{t: t}
	if err := errors.Join(t.Add(l.Local, 0, l.Remote, 0, size), t.Notify(n.msg[:])); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return n, nil
}

// send posts with a number as the message, and spins until the transfer is done,
// so that it can be posted again.
func (n *noted) send(v uint64) error {
	binary.LittleEndian.PutUint64(n.msg[:], v)
	if err := n.t.Post(); err != nil {
		return err
	}
	for !n.t.Done() {
		runtime.Gosched()
	}
	return n.t.Err()
}

// SendStamps posts count small writes, each with the time of the post behind it,
// and pauses between them so that the receiver goes to sleep.
func SendStamps(ctx context.Context, l Link, size uint64, count int, pause time.Duration) error {
	n, err := newNoted(&l, size)
	if err != nil {
		return err
	}
	defer n.t.Close()
	tick := time.NewTicker(pause)
	defer tick.Stop()
	for range count {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		now, err := clock()
		if err != nil {
			return err
		}
		if err := n.send(uint64(now)); err != nil {
			return fmt.Errorf("send a stamp: %w", err)
		}
	}
	return nil
}

// ReceiveStamps takes count messages as a goroutine parked on the engine's
// channel, and returns how old each was on arrival.
func ReceiveStamps(ctx context.Context, eng *engine.Engine, count int) (*Samples, error) {
	s := NewSamples(count)
	for s.Count() < count {
		select {
		case note := <-eng.Notifications():
			now, err := clock()
			if err != nil {
				return nil, err
			}
			if note.Err != nil {
				return nil, fmt.Errorf("receive a stamp: %w", note.Err)
			}
			if len(note.Data) != stampLen {
				return nil, fmt.Errorf("receive a stamp: %d bytes: %w", len(note.Data),
					engine.ErrCorrupt)
			}
			s.Add(time.Duration(now - int64(binary.LittleEndian.Uint64(note.Data))))
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	return s, nil
}

// PingPong posts count small writes with a message, and after each spins until
// the peer's answer is there. It returns the times of the round trips.
func PingPong(ctx context.Context, l Link, size uint64, count int) (*Samples, error) {
	n, err := newNoted(&l, size)
	if err != nil {
		return nil, err
	}
	defer n.t.Close()
	s := NewSamples(count)
	for i := range count {
		start := time.Now()
		if err := n.send(uint64(i)); err != nil {
			return nil, fmt.Errorf("send ping %d: %w", i, err)
		}
		if err := spin(ctx, l.Engine, uint64(i)); err != nil {
			return nil, fmt.Errorf("await pong %d: %w", i, err)
		}
		s.Add(time.Since(start))
	}
	return s, nil
}

// Pong answers count pings, spinning.
func Pong(ctx context.Context, l Link, size uint64, count int) error {
	n, err := newNoted(&l, size)
	if err != nil {
		return err
	}
	defer n.t.Close()
	for i := range count {
		if err := spin(ctx, l.Engine, uint64(i)); err != nil {
			return fmt.Errorf("await ping %d: %w", i, err)
		}
		if err := n.send(uint64(i)); err != nil {
			return fmt.Errorf("send pong %d: %w", i, err)
		}
	}
	return nil
}

// spin looks for the message number want without sleeping; every so often it
// looks whether it should end.
func spin(ctx context.Context, eng *engine.Engine, want uint64) error {
	var notes [1]engine.Notification
	for turn := 1; eng.Receive(notes[:]) == 0; turn++ {
		if turn%(1<<14) == 0 && ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	if notes[0].Err != nil {
		return notes[0].Err
	}
	if len(notes[0].Data) != stampLen || binary.LittleEndian.Uint64(notes[0].Data) != want {
		return fmt.Errorf("message %x, want number %d: %w", notes[0].Data, want, engine.ErrCorrupt)
	}
	return nil
}

// NotifyResult is LatencyResult beside a Unix socket. Op is "notify" (one way, to a parked
// goroutine) or "pingpong" (round trip, both ends spin).
func NotifyResult(backend, op string, size uint64, s, socket *Samples) Result {
	r := LatencyResult(backend, op, size, s)
	r.SetBaselines([]Baseline{{Name: "unix-socket", GBps: socket.rate(size),
		P50us: Micros(socket.Percentile(50))}})
	return r
}

// LatencyResult sums latencies up. Op "landing" is that of WritePing. The rates are those of
// one message after the other.
func LatencyResult(backend, op string, size uint64, s *Samples) Result {
	r := Result{Backend: backend, Op: op, Size: size, Batch: 1, Threads: 1, Rounds: 1,
		Ops: s.Count(), Route: backend,
		GBps: s.rate(size), P50us: Micros(s.Percentile(50)), P99us: Micros(s.Percentile(99))}
	r.OpsPerS = r.GBps * 1e9 / float64(size)
	return r
}

// rate is that of messages each of which takes the median time.
func (s *Samples) rate(size uint64) float64 { return GBps(size, s.Percentile(50)) }

// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// Benchmark runs the benchmark set over the wirings of two sides. Each shape
// alternates with a plain memcpy of the same shape in one thread of this process,
// in the same run and over memory of the same kind: "x-memcpy" is the backend's speed in
// units of memcpy's (median of the blocks; 1 is as fast as memcpy, higher is
// better). One batch is in flight at a time.
func Benchmark(b *testing.B, h Harness) {
	h = h.forBenchmarks()
	backend, err := h.New()
	if err != nil {
		SkipIfUnavailable(b, err)
	}
	caps := backend.Caps()
	if err := backend.Close(); err != nil {
		b.Fatalf("close a fresh backend: %v", err)
	}
	for _, w := range h.wirings(caps) {
		if w == Self && !h.SelfOnly {
			continue // the same as two backends in one process
		}
		b.Run(w.String(), func(b *testing.B) {
			benchShapes(b, h, w)
			b.Run("register", func(b *testing.B) { benchRegister(newStage(b, h, w), b) })
			for _, parked := range []bool{false, true} {
				name := map[bool]string{false: "roundtrip/spinning",
					true: "roundtrip/parked"}[parked]
				b.Run(name, func(b *testing.B) { benchRoundTrip(newStage(b, h, w), b, parked) })
			}
		})
	}
}

// alternation times two ways to do the same, in turn.
type alternation struct {
	ours, memcpy []time.Duration
}

// round runs both, in turn as the first.
func (t *alternation) round(ours, memcpy func()) {
	if len(t.ours)%2 == 1 {
		t.memcpy = append(t.memcpy, timed(memcpy))
	}
	t.ours = append(t.ours, timed(ours))
	if len(t.memcpy) < len(t.ours) {
		t.memcpy = append(t.memcpy, timed(memcpy))
	}
}

func timed(f func()) time.Duration {
	begin := time.Now()
	f()
	return max(1, time.Since(begin))
}

// report replaces the framework's time, which holds both ways, by medians: a
// busy machine disturbs some blocks, not most.
func (t *alternation) report(b *testing.B, block int, bytes uint64) {
	ratios := make([]float64, len(t.ours))
	for i := range t.ours {
		ratios[i] = float64(t.memcpy[i]) / float64(t.ours[i])
	}
	ours, memcpy := median(t.ours)/float64(block), median(t.memcpy)/float64(block)
	slices.Sort(ratios)
	b.ReportMetric(ours, "ns/op")
	b.ReportMetric(memcpy, "memcpy-ns/op")
	b.ReportMetric(ratios[len(ratios)/2], "x-memcpy")
	b.ReportMetric(float64(bytes)/ours*1e3, "MB/s")
}

// median returns nanoseconds.
func median(d []time.Duration) float64 {
	slices.Sort(d)
	return float64(d[len(d)/2].Nanoseconds())
}

// benchRegister registers 16,000 regions of one allocation: as many blocks as a
// pool of a KV cache may have.
func benchRegister(s *stage, b *testing.B) {
	const count = 16_000
	n := uint64(4096)
	whole := s.near.region(s.home.share(n * count).id).seg
	memories := make([]driver.Memory, count)
	token := make([]byte, 0, driver.TokenMax)
	var spent time.Duration
	for b.Loop() {
		begin := time.Now()
		for i := range uint64(count) {
			seg, err := whole.Slice(i*n, n, [16]byte{byte(i), byte(i >> 8), 1})
			if err != nil {
				b.Fatal(err)
			}
			if memories[i], err = s.near.b.Register(seg); err != nil {
				b.Fatalf("register region %d: %v", i, err)
			}
			if _, err = memories[i].AppendToken(token); err != nil {
				b.Fatalf("token of region %d: %v", i, err)
			}
		}
		spent += time.Since(begin)
		for _, m := range memories {
			if err := m.Revoke(context.Background()); err != nil {
				b.Fatalf("revoke memory: %v", err)
			}
		}
	}
	b.ReportMetric(float64(spent.Nanoseconds())/float64(b.N), "ns/op")
	b.ReportMetric(float64(spent.Nanoseconds())/float64(b.N)/count, "ns/region")
}

// benchRoundTrip sends a message of 64 bytes and waits for its echo.
func benchRoundTrip(s *stage, b *testing.B, parked bool) {
	if missing := s.lacks(driver.CanNotify); missing != "" {
		b.Log(missing)
		return
	}
	back := s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
	s.far.must(request{Do: "echo", Peer: back, Parked: parked})
	msg := make([]byte, 64)
	var trips []time.Duration
	for b.Loop() {
		begin := time.Now()
		s.submitNotify(msg)
		s.awaitEcho(b, parked)
		trips = append(trips, time.Since(begin))
	}
	slices.Sort(trips)
	b.ReportMetric(float64(trips[len(trips)/2].Nanoseconds()), "p50-ns")
	b.ReportMetric(float64(trips[len(trips)*99/100].Nanoseconds()), "p99-ns")
	for _, fault := range s.far.must(request{Do: "calm"}).Faults {
		b.Errorf("far side: %s", fault)
	}
}

func (s *stage) awaitEcho(b *testing.B, parked bool) {
	var msgs [1]driver.Message
	arrived := func() bool {
		n, err := s.near.look(msgs[:])
		if err != nil {
			b.Fatal(fmt.Errorf("receive: %w", err))
		}
		return n == 1
	}
	if parked {
		s.sleepUntil("echo", arrived)
		return
	}
	if err := s.near.ledger.until(s.h.Limit, arrived); err != nil {
		b.Fatal(fmt.Errorf("wait for the echo: %w", err))
	}
}

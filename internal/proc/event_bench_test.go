// SPDX-License-Identifier: Apache-2.0

package proc

import "testing"

// BenchmarkRoundTrip is two wake-ups: there and back, both sides asleep.
func BenchmarkRoundTrip(b *testing.B) {
	ping, pong := mustEvent(b), mustEvent(b)
	go func() {
		for ping.Wait() == nil {
			_ = pong.Signal()
		}
	}()
	b.ReportAllocs()
	for b.Loop() {
		_ = ping.Signal()
		_ = pong.Wait()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/2, "ns/wake-up")
}

// BenchmarkChannelRoundTrip is what the Go scheduler alone needs for the same.
func BenchmarkChannelRoundTrip(b *testing.B) {
	ping, pong := make(chan struct{}), make(chan struct{})
	go func() {
		for range ping {
			pong <- struct{}{}
		}
	}()
	defer close(ping)
	for b.Loop() {
		ping <- struct{}{}
		<-pong
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/2, "ns/wake-up")
}

// BenchmarkSignal is the cost of waking.
func BenchmarkSignal(b *testing.B) {
	e := mustEvent(b)
	b.ReportAllocs()
	for b.Loop() {
		_ = e.Signal()
	}
}

// BenchmarkSignalled is a Wait that need not sleep, and its Signal.
func BenchmarkSignalled(b *testing.B) {
	e := mustEvent(b)
	b.ReportAllocs()
	for b.Loop() {
		_ = e.Signal()
		_ = e.Wait()
	}
}

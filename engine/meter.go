// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"math"
	"sync"
	"time"
)

// meter measures the rate of a connection: bytes over the time in which it was busy, however
// many transfers shared it. Only large transfers count, since small ones say more of latency.
type meter struct {
	mu     sync.Mutex    // guards what follows
	active int           // large transfers under way
	since  time.Duration // begin of the sample
	bytes  uint64        // that have been moved in it
	failed bool          // a transfer of it failed: its bytes are not known

	rate    float64 // bytes a second, smoothed
	samples uint64
	last    time.Duration // end of the last sample
}

const (
	rateBytesMin   = 1 << 20               // 1 MiB
	rateSamplesMin = 8                     // before which a rate is not believed
	rateSample     = 10 * time.Millisecond // of a connection that is busy all the time
	rateHalfLife   = 5 * time.Second       // in which what was measured loses half of its weight
	rateLives      = 6                     // half-lives after which it has none
)

// enter begins a large transfer.
func (m *meter) enter(now time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.active == 0 {
		m.since, m.bytes, m.failed = now, 0, false
	}
	m.active++
}

// leave ends one.
func (m *meter) leave(now time.Duration, bytes uint64, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.active--
	if ok {
		m.bytes += bytes
	} else {
		m.failed = true
	}
	took := now - m.since
	if m.active > 0 && took < rateSample || took <= 0 {
		return
	}
	if !m.failed {
		rate := float64(m.bytes) / took.Seconds()
		if m.samples++; m.samples > 1 {
			rate = m.rate*7/8 + rate/8
		}
		m.rate, m.last = rate, now
	}
	m.since, m.bytes, m.failed = now, 0, false
}

// measured returns the rate, 0 until it is believable.
func (m *meter) measured() float64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.samples < rateSamplesMin {
		return 0
	}
	return m.rate
}

// estimate returns the rate by which to choose, and whether it was measured. What is not
// measured again loses its weight against what the backend has declared, so that a route
// that was slow once is tried again.
func (m *meter) estimate(now time.Duration, declared float64) (rate float64, isMeasured bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	age := now - m.last
	if m.samples < rateSamplesMin || m.active == 0 && age > rateLives*rateHalfLife {
		return declared, false
	}
	if m.active > 0 {
		age = min(age, rateSample)
	}
	weight := math.Exp2(-age.Seconds() / rateHalfLife.Seconds())
	return declared + (m.rate-declared)*weight, true
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/hex"
	"errors"
	"math"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"
)

// Stats is a copy of the counters. They only grow, and never block a transfer.
type Stats struct {
	Routes        []RouteStats // one for each peer and backend that are connected
	Posted        int          // transfers in flight now
	Regions       int
	Peers         int // that this engine has connected to
	Leases        int
	Stray         uint64       // completions that no transfer waited for: a backend's fault
	Notifications int          // waiting in the channel now
	Classes       []ClassStats // by Class; nil without Config.Schedule
}

// RouteStats counts the transfers to one peer over one backend.
type RouteStats struct {
	Peer, Backend string
	Engine        string // of the peer: tells two of one name apart
	Transfers     uint64 // that succeeded
	Bytes         uint64 // of those
	Errors        map[string]uint64
	Latency       Histogram // of those that succeeded, post to completion
	Rate          float64   // measured, of large transfers of large pieces; 0: not known yet
}

// The kinds under which errors are counted; the first that matches counts.
var errorKinds = []struct {
	name string
	err  error
}{
	{"aborted", ErrAborted}, {"revoked", ErrRevoked}, {"timeout", ErrTimeout},
	{"peer lost", ErrPeerLost},
	{"closed", ErrClosed}, {"bounds", ErrBounds}, {"corrupt", ErrCorrupt}, {"fault", ErrFault},
	{"other", nil},
}

// counters are those of a connection.
type counters struct {
	bytes   atomic.Uint64
	errors  [9]atomic.Uint64 // by errorKinds
	latency [histogramBuckets]atomic.Uint64
	meter
}

// count counts a transfer that has ended.
func (c *counters) count(bytes uint64, took time.Duration, err error) {
	if err == nil {
		if bytes > 0 {
			c.bytes.Add(bytes)
		}
		c.latency[bucketOf(took)].Add(1)
		return
	}
	for i, k := range errorKinds {
		if k.err == nil || errors.Is(err, k.err) {
			c.errors[i].Add(1)
			return
		}
	}
}

// record counts a transfer that ended on the connections that it used.
func (t *Transfer) record(err error) {
	if t.quiet {
		return
	}
	took := t.e.now() - t.postedAt
	if len(t.groups) == 0 && len(t.batches) > 0 { // a message alone
		t.batches[0].conn.counters.count(0, took, err)
	}
	for i := range t.groups {
		g := &t.groups[i]
		g.conn.counters.count(g.bytes, took, err)
		if g.measuresRate() {
			g.conn.counters.leave(t.e.now(), g.bytes, err == nil)
		}
	}
}

// Stats returns the counters as they are.
func (e *Engine) Stats() Stats {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := Stats{
		Posted: e.slots.posted(), Regions: len(e.regions), Peers: len(e.peers) - e.private,
		Leases: len(e.leases), Stray: e.dropped.Load(), Notifications: len(e.inbox),
		Classes: e.schedule.stats(),
	}
	for p := range e.peers {
		for _, c := range p.conns {
			if c == nil || p.isPrivate() {
				continue
			}
			r := RouteStats{Peer: p.name, Backend: c.lane.caps.Name,
				Engine: hex.EncodeToString(p.id[:8]), Bytes: c.counters.bytes.Load(),
				Errors: map[string]uint64{}, Rate: c.counters.measured()}
			for i, k := range errorKinds {
				if n := c.counters.errors[i].Load(); n > 0 {
					r.Errors[k.name] = n
				}
			}
			for i := range r.Latency.Buckets {
				r.Latency.Buckets[i] = c.counters.latency[i].Load()
				r.Transfers += r.Latency.Buckets[i]
			}
			s.Routes = append(s.Routes, r)
		}
	}
	return s
}

// A Histogram has eight buckets for each power of two, from histogramMin on.
const (
	histogramSteps   = 8
	histogramBits    = 6  // of the first power: 64 ns
	histogramPowers  = 33 // up to 2^39 ns, nine minutes
	histogramMin     = 1 << histogramBits
	histogramBuckets = 1 + histogramPowers*histogramSteps
)

// Histogram counts durations. Bounds says what a bucket holds.
type Histogram struct {
	Buckets [histogramBuckets]uint64
}

// bucketOf returns the bucket of a duration.
func bucketOf(d time.Duration) int {
	if d < histogramMin {
		return 0
	}
	power := bits.Len64(uint64(d)) - 1
	step := int(d>>(power-3)) % histogramSteps
	return min(1+(power-histogramBits)*histogramSteps+step, histogramBuckets-1)
}

// Bounds returns which durations bucket i holds: those from low on that are below high. They
// differ by an eighth. The first holds all below 64 ns, the last all from its low on.
func (h *Histogram) Bounds(i int) (low, high time.Duration) {
	if i <= 0 {
		return 0, histogramMin
	}
	i--
	shift := histogramBits + i/histogramSteps - 3
	n := time.Duration(histogramSteps + i%histogramSteps)
	return n << shift, (n + 1) << shift
}

// Quantile returns the q-th quantile, 0 when empty. It is off by an eighth at most.
func (h *Histogram) Quantile(q float64) time.Duration {
	var total uint64
	for _, n := range h.Buckets {
		total += n
	}
	rank := uint64(math.Ceil(min(max(q, 0), 1) * float64(total)))
	rank = max(rank, min(1, total))
	for i, n := range h.Buckets {
		if n >= rank && rank > 0 {
			low, high := h.Bounds(i)
			return low + time.Duration(float64(high-low)*float64(rank)/float64(n))
		}
		rank -= min(n, rank)
	}
	return 0
}

// meter measures the rate of a connection: bytes over the time in which it was busy, however
// many transfers shared it. Only large transfers of large pieces count, since small ones say more
// of latency, and of what a piece costs: scattered entries of a cache would make the best backend
// look slower than another is declared.
type meter struct {
	mu     sync.Mutex    // guards the fields below
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
	ratePieceMin   = 64 << 10              // on average
	rateSamplesMin = 8                     // before which a rate is not believed
	rateSample     = 10 * time.Millisecond // of a connection that is busy all the time
	rateHalfLife   = 5 * time.Second       // in which a measured rate loses half of its weight
	rateLives      = 6                     // half-lives after which it has none
)

// measuresRate reports whether the time of a transfer says at what rate its connection moves bytes.
func (g *group) measuresRate() bool {
	if g.bytes < rateBytesMin {
		return false
	}
	pieces := len(g.descs)
	for i := range g.patterns {
		pieces += g.patterns[i].Count * g.patterns[i].Runs()
	}
	return g.bytes/ratePieceMin >= uint64(pieces)
}

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

// SPDX-License-Identifier: Apache-2.0

package tcp

import "time"

// What a peer sends carries a time by the owner's clock that is past. The peer works it out by its
// own clock from the last that the owner told, and the two clocks do not run alike. The kernel
// corrects CLOCK_MONOTONIC, which this is, by at most 500 ppm for NTP (MAXFREQ of linux/timex.h:
// more is a step, or a slew that a daemon was configured for), so two hosts drift apart by at
// most 1,000 ppm: one part in driftPart. The peer takes the owner's clock for so much slower.
// CLOCK_MONOTONIC_RAW, which nothing corrects, would cost Go a system call for each look.
const driftPart = 1000

// stampMax is how old what a peer knows of the owner's clock may be. Its time lags by 60 ms then.
const stampMax = int64(time.Minute)

// steady is how far the owner's clock has come at least when ours shows that.
func steady(now int64) int64 { return now - now/driftPart }

// learn takes what the owner's clock showed when it sent this.
func (p *peer) learn(stamp int64) {
	if stamp > 0 {
		now := p.b.clock.Now()
		p.offset.Store(stamp - steady(now)) // it was later there than that when this arrived
		p.learned.Store(now)
	}
}

// stamp is a time by the owner's clock that is past: 0 if we do not know, and the owner asks.
func (p *peer) stamp() int64 {
	now := p.b.clock.Now()
	if now-p.learned.Load() > stampMax {
		return 0
	}
	return steady(now) + p.offset.Load()
}

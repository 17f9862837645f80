// SPDX-License-Identifier: Apache-2.0

package tcp

import "time"

// began lies before the process does, so that no time by the clock is near 0, which stands for
// never.
var began = time.Now().Add(-time.Hour)

// clock is nanoseconds since began. It stands still while the host is suspended.
func clock() int64 { return int64(time.Since(began)) }

// stampMax is how old what we know of the owner's clock may be: two clocks that drift apart by
// 200 ppm are 12 ms apart by then.
const stampMax = int64(time.Minute)

// learn takes what the owner's clock showed when it sent this.
func (p *peer) learn(stamp int64) {
	if stamp > 0 {
		now := clock()
		p.offset.Store(stamp - now) // it was later there than that when this arrived
		p.learned.Store(now)
	}
}

// stamp is a time by the owner's clock that is past: 0 if we do not know, and the owner asks.
func (p *peer) stamp() int64 {
	now := clock()
	if now-p.learned.Load() > stampMax {
		return 0
	}
	return now + p.offset.Load()
}

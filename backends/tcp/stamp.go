// SPDX-License-Identifier: Apache-2.0

package tcp

import "time"

// stampMax is how old what we know of the owner's clock may be: two clocks that drift apart by
// 200 ppm are 12 ms apart by then.
const stampMax = int64(time.Minute)

// learn takes what the owner's clock showed when it sent this.
func (p *peer) learn(stamp int64) {
	if stamp > 0 {
		now := p.b.clock.Now()
		p.offset.Store(stamp - now) // it was later there than that when this arrived
		p.learned.Store(now)
	}
}

// stamp is a time by the owner's clock that is past: 0 if we do not know, and the owner asks.
func (p *peer) stamp() int64 {
	now := p.b.clock.Now()
	if now-p.learned.Load() > stampMax {
		return 0
	}
	return now + p.offset.Load()
}

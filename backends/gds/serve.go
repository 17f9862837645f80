// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/internal/ownfiles"
)

// serve handles requests that have ended, and begins what there is room for.
func (b *Backend) serve() {
	b.flights.Mu.Lock()
	for {
		n := b.ends.Poll(b.landed[:])
		for i := range n {
			b.land(&b.landed[i])
		}
		if n < len(b.landed) {
			break
		}
	}
	b.flights.Pump()
	b.leave()
}

// leave gives the lock up, and then does what must not be done under it.
func (b *Backend) leave() {
	need := b.flights.Queued() || b.flights.Waited() // what has ended cannot wait for Poll
	nudge := need && !b.heeding
	switch {
	case nudge:
		b.ends.Heed(1)
	case !need && b.heeding:
		b.ends.Heed(-1)
	}
	b.heeding = need
	news := b.flights.News
	b.flights.News = false
	p := b.takeCrossing()
	b.flights.Mu.Unlock()
	if p != nil {
		b.hand(p)
	}
	if news {
		b.wake()
	}
	if nudge {
		_ = b.heed.Signal() // of what had ended before; fails only when closed
	}
}

// land handles the end of a request, which may be the beginning of another try.
func (b *Backend) land(d *ring.Done) {
	r := &b.requests[d.Tag]
	again, err := r.judge(d)
	if again {
		b.launch(r)
		return
	}
	if s := r.mem.Extent.shared; s != nil && !r.write {
		s.Leave()
	}
	j := r.j
	*r = request{slot: r.slot}
	b.free = append(b.free, r)
	b.flights.Landed(&j.Job, err)
}

// room implements ownfiles.Config.
func (b *Backend) room() bool { return len(b.free) > 0 }

// begin implements ownfiles.Config.
func (b *Backend) begin(of *ownfiles.Job[extent]) bool {
	r := b.cut(&b.jobs[of.Slot])
	if r != nil {
		b.launch(r)
	}
	return r != nil
}

// finish implements ownfiles.Config.
func (b *Backend) finish(of *ownfiles.Job[extent]) bool {
	for i := range of.Views {
		of.Views[i].Remote.Extent.file.endTurn(&b.jobs[of.Slot])
	}
	return true
}

// stop ends requests of jobs that have failed, and begins no more of them.
//
// Preconditions: flights.Mu is held.
func (b *Backend) stop() {
	for i := range b.requests {
		if r := &b.requests[i]; r.j != nil && r.j.Err != nil && !r.ending {
			r.ending = true
			b.mover.Cancel(r.slot, true)
		}
	}
	b.flights.Pump()
}

// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
)

// Close implements driver.Peer. It waits a while for what is on its way, at most for
// Config.CloseMax, and then asks the owner to land nothing any more: that is proved when the
// owner says so, or when all that we sent is too old to land. So it takes at most CloseMax
// and 9/8 of the age limit of the connection; where the network's round trip makes that limit
// longer than Grace, the first wait is shorter by as much.
func (p *peer) Close() error {
	if p.entry.Shut() {
		close(p.closing)
	}
	p.entry.Wait()
	p.part(driver.ErrClosed)
	return nil
}

// part ends the connections and completes all batches with why. It returns when that is done,
// by whichever goroutine.
func (p *peer) part(why error) {
	p.ending.Do(func() {
		if p.dead.Load() {
			why = driver.ErrPeerLost // also where the program closes first
		} else {
			p.dropAll(why)
			p.awaitQuiet()
		}
		p.mu.Lock()
		p.failed = true
		busy := len(p.byTag) > 0
		last := p.lastSent
		if busy && last != 0 {
			last += p.grace + p.grace/8 // more than the clocks drift apart: see driftPart
		}
		p.mu.Unlock()
		for _, c := range p.conns[express:] {
			c.stop()
		}
		for _, c := range p.conns[express:] {
			c.close(busy)
		}
		if busy {
			p.conns[ctl].send(header{kind: kindStop})
			p.outlive(last)
		}
		p.conns[ctl].close(busy)
		p.completeAll(why)
		p.b.leave(p)
		p.losing.Do(func() {
			p.why = driver.ErrClosed
			p.dead.Store(true)
			close(p.lost)
		})
	})
}

// dropAll takes what waits out of the queues.
func (p *peer) dropAll(why error) {
	var over []*batch
	p.mu.Lock()
	for _, x := range p.byTag {
		if x.queue == nil {
			continue // all of it is on its way, and a message may be
		}
		if p.drop(x, why); x.flying == 0 {
			over = append(over, x)
		}
	}
	for _, x := range over {
		p.settled(x)
	}
	p.mu.Unlock()
	for _, x := range over {
		p.finishBatch(x)
	}
	p.conns[express].kickAnswers()
}

// awaitQuiet waits for what is on its way.
func (p *peer) awaitQuiet() {
	p.mu.Lock()
	longer := p.grace - int64(p.b.cfg.Grace)
	p.mu.Unlock()
	end := p.b.clock.Now() + int64(p.b.cfg.CloseMax) - longer - longer/8
	for pause := 10 * time.Microsecond; !p.dead.Load(); pause = min(2*pause, time.Millisecond) {
		p.mu.Lock()
		n := len(p.byTag)
		p.mu.Unlock()
		if n == 0 && p.written() || p.b.clock.Now() > end {
			return
		}
		p.b.clock.Sleep(pause)
	}
}

// written reports whether nothing waits to be written.
func (p *peer) written() bool {
	for _, c := range p.conns {
		if c.kicks.Load() > 0 {
			return false
		}
	}
	return true
}

// outlive waits until nothing that we said can let bytes land: the owner says that it has
// stopped, or the time has come at which all we said is too old; see grace.go.
func (p *peer) outlive(until int64) {
	if until == 0 {
		return
	}
	old, timer := clock.After(p.b.clock, time.Duration(until-p.b.clock.Now()))
	defer timer.Stop()
	select {
	case <-old:
	case <-p.quit:
	}
}

// completeAll ends what is left.
func (p *peer) completeAll(why error) {
	p.mu.Lock()
	var left []*batch
	for tag, x := range p.byTag {
		delete(p.byTag, tag)
		if x.err == nil {
			x.err = why
		}
		left = append(left, x)
	}
	p.small, p.large, p.flight = queue{}, queue{}, make([]inFlight, len(p.conns))
	p.mu.Unlock()
	for _, x := range left {
		p.finishBatch(x)
	}
}

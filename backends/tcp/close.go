// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"time"

	"github.com/sluicehq/sluice/driver"
)

// Close implements driver.Peer. What is on its way is waited for, see Config.CloseMax; after
// that the connections are cut, and we wait until the owner takes what it still finds in its
// sockets for too old.
func (p *peer) Close() error {
	if p.entry.Shut() {
		close(p.closing)
	}
	p.entry.Wait()
	p.part(driver.ErrClosed)
	return nil
}

// part ends the connections and completes all batches with why. It returns when that is done,
// whoever does it.
func (p *peer) part(why error) {
	p.ending.Do(func() {
		if p.dead.Load() {
			why = driver.ErrPeerLost // also where the program hears of it and closes first
		} else {
			p.dropAll(why)
			p.awaitQuiet()
		}
		p.mu.Lock()
		p.failed = true
		busy := len(p.byTag) > 0
		last := p.lastSent
		if p.lead.watch != nil {
			p.lead.watch.Stop()
		}
		p.mu.Unlock()
		for _, c := range p.conns[express:] {
			c.stop()
		}
		for _, c := range p.conns[express:] {
			c.close(busy)
		}
		if busy {
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

// dropAll takes what waits out of the lines.
func (p *peer) dropAll(why error) {
	var over []*batch
	p.mu.Lock()
	for _, x := range p.byTag {
		if x.line == nil {
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
		p.finishBatch(x, true)
	}
	p.conns[express].kickAnswers()
}

// awaitQuiet waits for what is on its way: CloseMax for an owner that says nothing, and four times
// that for one that is slow.
func (p *peer) awaitQuiet() {
	begin, silence := clock(), int64(p.b.cfg.CloseMax)
	for pause := 10 * time.Microsecond; !p.dead.Load(); pause = min(2*pause, time.Millisecond) {
		if now := clock(); now-max(begin, p.heard.Load()) > silence || now-begin > 4*silence {
			return
		}
		p.mu.Lock()
		n := len(p.byTag)
		p.mu.Unlock()
		if n == 0 && p.written() {
			return
		}
		time.Sleep(pause)
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

// outlive waits until nothing that we said can let bytes land: the owner has closed control, or what
// we said is too old. The owner lands what was sent within its grace, and else asks us, who say nothing
// any more. The eighth is for clocks that do not run alike.
func (p *peer) outlive(last int64) {
	if last == 0 {
		return
	}
	old := time.NewTimer(time.Duration(last + p.grace + p.grace/8 - clock()))
	defer old.Stop()
	select {
	case <-old.C:
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
	p.small, p.large, p.books = line{}, line{}, make([]books, len(p.conns))
	p.mu.Unlock()
	for _, x := range left {
		p.finishBatch(x, true)
	}
}

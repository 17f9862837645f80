// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"github.com/sluicehq/sluice/driver"
)

// Submit implements driver.Peer. It takes a batch and hands its first requests over, with one crossing into C.
func (p *peer) Submit(op driver.Op, tag uint64, descs []driver.Desc) error {
	b := p.b
	if !b.books.Gate.Enter() {
		return driver.ErrClosed
	}
	defer b.books.Gate.Exit()
	b.books.Mu.Lock()
	if err := p.accept(op, tag, descs); err != nil {
		b.books.Mu.Unlock()
		return err
	}
	b.pump()
	b.leave()
	return nil
}

// accept makes a job of a batch, or says why not.
func (p *peer) accept(op driver.Op, tag uint64, descs []driver.Desc) error {
	b := p.b
	if err := p.Accepts(op); err != nil {
		return err
	}
	if len(b.freeJobs) == 0 || !b.done.Take() { // a job for each place, but those that wait for Poll
		return driver.ErrFull
	}
	j := b.freeJobs[len(b.freeJobs)-1]
	if err := j.ViewAll(&p.Peer, op, descs, descsMax); err != nil {
		j.Clear()
		b.done.GiveBack()
		return err
	}
	b.freeJobs = b.freeJobs[:len(b.freeJobs)-1]
	j.set(descs)
	j.Begin(&p.Peer, op, tag)
	j.queued, j.at, j.flying = true, cursor{}, 0
	b.queue.Push(j)
	return nil
}

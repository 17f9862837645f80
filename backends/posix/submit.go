// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"github.com/sluicehq/sluice/driver"
)

// can is what the peers take.
const can = driver.CanPattern | driver.CanNest | driver.CanDurable

// Can implements driver.Peer.
func (p *peer) Can() driver.Can { return can }

// Submit implements driver.Peer. It hands the first requests of a batch to the kernel, with one
// call.
func (p *peer) Submit(tag uint64, batch *driver.Batch) error {
	b := p.b
	if err := batch.Check(can); err != nil {
		return err
	}
	if !b.books.Gate.Enter() {
		return driver.ErrClosed
	}
	defer b.books.Gate.Exit()
	b.books.Mu.Lock()
	if err := p.accept(tag, batch); err != nil {
		b.books.Mu.Unlock()
		return err
	}
	b.pump()
	b.leave()
	return nil
}

// accept makes a job of a batch, or says why not.
func (p *peer) accept(tag uint64, batch *driver.Batch) error {
	b := p.b
	if p.Closed() {
		return driver.ErrClosed
	}
	if len(b.freeJobs) == 0 || !b.done.Take() { // a job for each place, but those that wait for Poll
		return driver.ErrFull
	}
	j := b.freeJobs[len(b.freeJobs)-1]
	j.durable = batch.Durable || b.cfg.Durable && batch.Op == driver.Write
	err := j.Take(&p.Peer, batch, descsMax, runsMax)
	if err == nil && j.durable {
		err = j.checkDurable()
	}
	if err != nil {
		j.Clear()
		b.done.GiveBack()
		return err
	}
	b.freeJobs = b.freeJobs[:len(b.freeJobs)-1]
	j.sort()
	j.Begin(&p.Peer, batch.Op, tag)
	j.queued, j.at, j.high, j.flying, j.syncs, j.synced = true, cursor{}, 0, 0, 0, false
	if j.durable {
		b.durables++
	}
	b.queue.Push(j)
	return nil
}

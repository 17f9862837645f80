// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"github.com/sluicehq/sluice/driver"
)

// Submit implements driver.Peer.
func (p *peer) Submit(op driver.Op, tag uint64, descs []driver.Desc) error {
	return p.submit(op, tag, descs, nil, p.b.cfg.Durable)
}

// SubmitPages implements driver.Pager.
func (p *peer) SubmitPages(op driver.Op, tag uint64, pages *driver.Pages, _ []byte) error {
	return p.submit(op, tag, nil, pages, p.b.cfg.Durable)
}

// SubmitDurable implements driver.Persister.
func (p *peer) SubmitDurable(tag uint64, descs []driver.Desc, pages *driver.Pages) error {
	return p.submit(driver.Write, tag, descs, pages, true)
}

// submit takes a batch and hands its first requests to the kernel, with one call.
func (p *peer) submit(op driver.Op, tag uint64, descs []driver.Desc, pages *driver.Pages, durable bool) error {
	b := p.b
	if !b.books.Gate.Enter() {
		return driver.ErrClosed
	}
	defer b.books.Gate.Exit()
	b.books.Mu.Lock()
	err := p.accept(op, tag, descs, pages, durable)
	if err != nil {
		b.books.Mu.Unlock()
		return err
	}
	b.pump()
	b.leave()
	return nil
}

// accept makes a job of a batch, or says why not.
func (p *peer) accept(op driver.Op, tag uint64, descs []driver.Desc, pages *driver.Pages, durable bool) error {
	b := p.b
	err := p.Accepts(op)
	if err != nil {
		return err
	}
	if len(b.freeJobs) == 0 || !b.done.Take() { // a job for each place, but those that wait for Poll
		return driver.ErrFull
	}
	j := b.freeJobs[len(b.freeJobs)-1]
	if pages != nil {
		err = j.viewPages(p, op, pages)
	} else {
		err = j.ViewAll(&p.Peer, op, descs, descsMax)
	}
	if err != nil {
		j.clear()
		b.done.GiveBack()
		return err
	}
	b.freeJobs = b.freeJobs[:len(b.freeJobs)-1]
	if pages != nil {
		j.setPages(pages)
	} else {
		j.setDescs(descs)
	}
	j.Begin(&p.Peer, op, tag)
	j.queued, j.at, j.high, j.flying, j.syncs, j.synced = true, cursor{}, 0, 0, 0, false
	if j.durable = durable && op == driver.Write; j.durable {
		b.durables++
	}
	b.queue.Push(j)
	return nil
}

// viewPages checks a pattern and notes its memories.
func (j *job) viewPages(p *peer, op driver.Op, g *driver.Pages) error {
	if g.Count > pagesMax {
		return driver.ErrBounds
	}
	if err := j.View(&p.Peer, op, g.LocalKey, g.RemoteKey); err != nil {
		return err
	}
	return g.Check(j.Views[0].Local.Size, j.Views[0].Remote.Size)
}

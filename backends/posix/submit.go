// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"github.com/sluicehq/sluice/backends"
)

// Submit implements backends.Peer.
func (p *peer) Submit(op backends.Op, tag uint64, descs []backends.Desc) error {
	return p.submit(op, tag, descs, nil, p.b.cfg.Durable)
}

// SubmitPages implements backends.Pager.
func (p *peer) SubmitPages(op backends.Op, tag uint64, pages *backends.Pages, _ []byte) error {
	return p.submit(op, tag, nil, pages, p.b.cfg.Durable)
}

// SubmitDurable implements backends.Persister.
func (p *peer) SubmitDurable(tag uint64, descs []backends.Desc, pages *backends.Pages) error {
	return p.submit(backends.Write, tag, descs, pages, true)
}

// submit takes a batch and hands its first requests to the kernel, with one call.
func (p *peer) submit(op backends.Op, tag uint64, descs []backends.Desc, pages *backends.Pages, durable bool) error {
	b := p.b
	if !b.books.Gate.Enter() {
		return backends.ErrClosed
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
func (p *peer) accept(op backends.Op, tag uint64, descs []backends.Desc, pages *backends.Pages, durable bool) error {
	b := p.b
	err := p.Accepts(op)
	if err != nil {
		return err
	}
	if len(b.freeJobs) == 0 || !b.done.Take() { // a job for each place, but those that wait for Poll
		return backends.ErrFull
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
	if j.durable = durable && op == backends.Write; j.durable {
		b.durables++
	}
	b.queue.Push(j)
	return nil
}

// viewPages checks a pattern and notes its memories.
func (j *job) viewPages(p *peer, op backends.Op, g *backends.Pages) error {
	if g.Count > pagesMax {
		return backends.ErrBounds
	}
	if err := j.View(&p.Peer, op, g.LocalKey, g.RemoteKey); err != nil {
		return err
	}
	return g.Check(j.Views[0].Local.Size, j.Views[0].Remote.Size)
}

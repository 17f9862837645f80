// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"net"
	"sync"

	"github.com/sluicehq/sluice/backends"
)

// A pull is a write into foreign memory: the initiator lays its addresses in a
// place of the connection page and rings; the owner reads the bytes into its own
// memory and answers. Until the owner has taken it the initiator may withdraw it,
// so that a frozen owner does not hold up a cancel.
const (
	pullPosted = 1 + iota
	pullTaken
	pullWithdrawn
)

// puller is the initiator's end.
type puller struct {
	mu      sync.Mutex
	bell    bell
	free    []int
	jobs    [pullMax]*job // who waits for an answer; nil: nobody any more
	busy    [pullMax]bool // an answer will come
	waiting []waitingPull // for a free place
}

type waitingPull struct {
	j *job
	p piece
}

func (q *puller) init(sock *net.UnixConn) error {
	for i := range pullMax {
		q.free = append(q.free, pullMax-1-i)
	}
	return q.bell.open(sock)
}

// startPull asks the owner for one piece. The job stays held until settle.
func (p *peer) startPull(j *job, pc *piece) {
	q := &p.pulls
	q.mu.Lock()
	if len(q.free) == 0 {
		own := *pc
		own.descs = append([]backends.Desc(nil), pc.descs...) // pc's may be the worker's scratch
		if pc.descs == nil {
			own.descs = nil
		}
		q.waiting = append(q.waiting, waitingPull{j, own})
	} else {
		p.post(j, pc)
	}
	q.mu.Unlock()
	switch { // it may have come too late for whoever ended it
	case p.closing.Load():
		p.withdraw(j, backends.ErrClosed)
	case p.lost.Load():
		p.abandonPulls(backends.ErrPeerLost)
	case j.wanted():
		p.withdraw(j, backends.ErrAborted)
	}
}

func (p *peer) place(i int) []byte {
	at := pullAt + i*pullBytes
	return p.page[at : at+pullBytes]
}

// post fills a free place and rings.
// Preconditions: pulls.mu is held, a place is free.
func (p *peer) post(j *job, pc *piece) {
	q := &p.pulls
	i := q.free[len(q.free)-1]
	q.free = q.free[:len(q.free)-1]
	q.jobs[i], q.busy[i] = j, true
	at := p.place(i)
	word(at, pullCountAt).Store(uint64(pc.n))
	word(at, pullKeyAt).Store(uint64(pc.remote.key))
	word(at, pullEpochAt).Store(pc.remote.epoch)
	base := addressOf(pc.local.bytes)
	for k := range pc.n {
		d := pc.at(k)
		e := at[pullEntriesAt+k*pullEntryBytes:]
		word(e, 0).Store(base + d.Local)
		word(e, 8).Store(d.Remote)
		word(e, 16).Store(d.Len)
	}
	word(at, pullStateAt).Store(pullPosted)
	if q.bell.ring(msgPull, byte(i), statusOK) != nil {
		_ = p.sock.Close() // a socket that does not take it is a lost peer
	}
}

// pulled takes the owner's answer: place, status.
func (p *peer) pulled(body []byte) error {
	if len(body) != 2 || body[0] >= pullMax {
		return backends.ErrCorrupt
	}
	i, err := int(body[0]), statusError(status(body[1]))
	q := &p.pulls
	q.mu.Lock()
	if !q.busy[i] {
		q.mu.Unlock()
		return backends.ErrCorrupt
	}
	j := q.jobs[i]
	q.jobs[i], q.busy[i] = nil, false
	q.free = append(q.free, i)
	if len(q.waiting) > 0 {
		next := q.waiting[0]
		q.waiting = q.waiting[1:]
		p.post(next.j, &next.p)
	}
	q.mu.Unlock()
	if j != nil {
		p.settle(j, err)
	}
	return nil
}

// settle puts a job back in the queue: the piece has landed or never will.
func (p *peer) settle(j *job, err error) {
	if err != nil {
		j.fail(err)
	}
	p.b.queue.push(j)
}

// withdraw ends the pulls of a job that the owner has not taken, of all jobs if
// j is nil.
func (p *peer) withdraw(j *job, err error) {
	p.endPulls(j, err, func(i int) bool {
		return word(p.place(i), pullStateAt).CompareAndSwap(pullPosted, pullWithdrawn)
	})
}

// abandonPulls ends all pulls, when no answer can come.
func (p *peer) abandonPulls(err error) {
	p.endPulls(nil, err, func(int) bool { return true })
}

func (p *peer) endPulls(j *job, err error, may func(i int) bool) {
	q := &p.pulls
	var ended []*job
	q.mu.Lock()
	for i, have := range q.jobs {
		if have != nil && (j == nil || have == j) && may(i) {
			q.jobs[i] = nil // the place stays busy until its answer
			ended = append(ended, have)
		}
	}
	kept := q.waiting[:0]
	for _, w := range q.waiting {
		if j == nil || w.j == j {
			ended = append(ended, w.j)
		} else {
			kept = append(kept, w)
		}
	}
	clear(q.waiting[len(kept):])
	q.waiting = kept
	q.mu.Unlock()
	for _, have := range ended {
		p.settle(have, err)
	}
}

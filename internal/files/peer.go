// SPDX-License-Identifier: Apache-2.0

package files

import (
	"context"
	"fmt"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// Peer is a connection of a backend to itself, for access to its own files. Core.Mu guards it.
type Peer struct {
	driver.PeerBase
	core    *Core
	closed  bool
	imports session.Imports[Memory]
}

var _ driver.Peer = (*Peer)(nil)

// Can implements driver.Peer.
func (p *Peer) Can() driver.Can { return p.core.Can }

// Import implements driver.Peer. The error of another backend's token wraps both ErrBadToken and
// ErrNotSupported.
func (p *Peer) Import(token []byte) (uint32, uint64, error) {
	c := p.core
	c.Mu.Lock()
	defer c.Mu.Unlock()
	if p.closed {
		return 0, 0, driver.ErrClosed
	}
	t, err := session.DecodeToken(token, &c.owner)
	if err != nil {
		return 0, 0, fmt.Errorf("import file: %w (%w: %w)", err, c.distant, driver.ErrNotSupported)
	}
	m := c.table.At(t.Key)
	if m == nil {
		return 0, 0, fmt.Errorf("import file: its registration has ended: %w", driver.ErrRevoked)
	}
	if err := m.admit(&t); err != nil {
		return 0, 0, fmt.Errorf("import file: %w", err)
	}
	key, err := p.imports.Add(m)
	if err != nil {
		return 0, 0, fmt.Errorf("import file: %w", err)
	}
	return key, m.Size, nil
}

// Drop implements driver.Peer.
func (p *Peer) Drop(key uint32) {
	p.core.Mu.Lock()
	defer p.core.Mu.Unlock()
	p.imports.Drop(key)
}

// Submit implements driver.Peer. It makes a job of the batch and begins its first requests; Serve
// begins the others.
func (p *Peer) Submit(tag uint64, batch *driver.Batch) error {
	c := p.core
	if err := batch.Check(c.Can); err != nil {
		return err
	}
	if !c.gate.Enter() {
		return driver.ErrClosed
	}
	defer c.gate.Exit()
	c.Mu.Lock()
	if p.closed {
		c.Mu.Unlock()
		return driver.ErrClosed
	}
	// done also counts completions that wait for Poll, so a slot may be missing while a job is
	// free.
	if len(c.freeJobs) == 0 || !c.done.Take() {
		c.Mu.Unlock()
		return driver.ErrFull
	}
	j := c.freeJobs[len(c.freeJobs)-1]
	j.op, j.tag, j.at, j.flying, j.syncs, j.synced = batch.Op, tag, cursor{}, 0, 0, false
	j.durable = batch.Durable || c.Durable && batch.Op == driver.Write
	if err := j.list(p, batch); err != nil {
		j.clear()
		c.done.GiveBack()
		c.Mu.Unlock()
		return err
	}
	c.freeJobs = c.freeJobs[:len(c.freeJobs)-1]
	c.lastJob = j
	if j.durable {
		c.durables++
	}
	j.by, j.queued = p, true
	c.queue.push(j)
	c.pump()
	c.Leave()
	return nil
}

// Cancel implements driver.Peer.
func (p *Peer) Cancel(tag uint64) {
	c := p.core
	if !c.gate.Enter() {
		return
	}
	defer c.gate.Exit()
	c.Mu.Lock()
	c.cancel(driver.ErrAborted, func(j *job) bool { return j.by == p && j.tag == tag })
	c.Leave()
}

// Help implements driver.Peer. While the job is the only one, its goroutine sleeps in the Mover
// until all that the job has under way has landed: one wake-up for a batch, where the program's
// descriptor would be signalled at each landing. A job that has more requests than the table holds
// gets the next ones whenever a quarter of the table has landed.
func (p *Peer) Help(tag uint64, stop <-chan struct{}) bool {
	c := p.core
	m, can := c.Mover.(Sleeper)
	if !can || isClosed(stop) || !c.gate.Enter() {
		return false
	}
	defer c.gate.Exit()
	c.Mu.Lock()
	j, did := c.lastJob, false
	// Another goroutine may end the job, and submit another one in its place.
	isMine := func() bool { return j != nil && j.by == p && j.tag == tag }
	if c.helped != nil || !isMine() {
		c.Mu.Unlock()
		return false
	}
	for c.helped = j; c.Helped() && isMine() && !isClosed(stop); c.Mu.Lock() {
		n := max(j.flying, 1)
		if j.queued {
			n = min(n, max(c.Depth/4, 1))
		}
		if n = m.Waits(n); n == 0 {
			break
		}
		did = true
		c.unlock()
		m.Sleep(n)
		c.Serve()
	}
	if isMine() {
		c.helped = nil
	}
	c.Leave()
	return did
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// Explain implements driver.Peer.
func (p *Peer) Explain(localKey, remoteKey uint32) string {
	c := p.core
	if !c.gate.Enter() {
		return "closed"
	}
	defer c.gate.Exit()
	c.Mu.Lock()
	defer c.Mu.Unlock()
	return c.Mover.Explain(c.table.At(localKey), p.imports.At(remoteKey))
}

// Close implements driver.Peer.
func (p *Peer) Close() error {
	c := p.core
	if !c.gate.Enter() {
		return nil // Backend.Close has closed every peer
	}
	defer c.gate.Exit()
	c.Mu.Lock()
	defer c.Mu.Unlock()
	p.closed = true
	err := c.await(context.Background(), driver.ErrClosed, func(j *job) bool { return j.by == p })
	p.imports = session.Imports[Memory]{}
	delete(c.peers, p)
	return err
}

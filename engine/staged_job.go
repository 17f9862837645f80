// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"slices"

	"github.com/sluicehq/sluice/driver"
)

// stagedJob is a batch.
type stagedJob struct {
	sp    *stagedPeer
	op    driver.Op
	tag   uint64
	descs []driver.Desc  // that have no slot yet
	pages driver.Pattern // the same
	paged bool

	durable bool

	flying     int // pieces
	unanswered int // pieces that the peer had in hand and did not answer for
	err        error
}

// look checks what was submitted.
func (j *stagedJob) look() error {
	if j.paged {
		return j.sp.lookup(j.pages.LocalKey, j.pages.RemoteKey,
			func(l *stagedMemory, m *stagedRemote) error {
				return errors.Join(j.fills(l), j.pages.Check(l.region.seg.Len, m.size))
			})
	}
	for i := range j.descs {
		d := &j.descs[i]
		if err := j.sp.lookup(d.LocalKey, d.RemoteKey,
			func(l *stagedMemory, m *stagedRemote) error {
				return errors.Join(j.fills(l), d.Check(l.region.seg.Len, m.size))
			}); err != nil {
			return &driver.PieceError{Piece: i, Err: err}
		}
	}
	return nil
}

func (sp *stagedPeer) lookup(localKey, remoteKey uint32, check func(*stagedMemory,
	*stagedRemote) error) error {
	l, m := sp.s.memory(localKey), sp.remote(remoteKey)
	if l == nil || m == nil {
		return fmt.Errorf("local key %d, remote key %d: %w", localKey, remoteKey, ErrBounds)
	}
	return check(l, m)
}

// fills says why no chain may: its last hop writes local memory as a peer's would.
func (j *stagedJob) fills(l *stagedMemory) error {
	if seg := &l.region.seg; j.op == driver.Read && seg.ReadOnly && seg.Kind != driver.DRAM {
		return fmt.Errorf("a chain fills a region as a peer does, and this one is ReadOnly: "+
			"register it without, or fill it from DRAM: %w", driver.ErrReadOnly)
	}
	return nil
}

func (sp *stagedPeer) remote(key uint32) *stagedRemote {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	return sp.remotes[key]
}

func (j *stagedJob) more() bool {
	if j.err != nil {
		return false
	}
	return len(j.descs) > 0 || j.paged && j.pages.Count > 0
}

// fail keeps the first cause.
func (j *stagedJob) fail(err error) {
	if j.err == nil {
		j.err = err
	}
}

func (j *stagedJob) outcome() error {
	if j.unanswered == 0 {
		return j.err
	}
	return fmt.Errorf("the peer has not answered for %d pieces that it has in hand: %w: %w",
		j.unanswered, driver.ErrUnproven, j.err)
}

func (j *stagedJob) happen() {
	sp := j.sp
	if sp.closing != nil {
		j.fail(ErrClosed)
	}
	sp.jobs[j.tag] = j
	sp.turn = append(sp.turn, j)
	sp.feed()
}

// feed gives free slots to batches, a piece each in turn, and completes what has ended.
func (sp *stagedPeer) feed() {
	for i := 0; i < len(sp.turn); {
		j := sp.turn[0]
		if !j.more() {
			sp.turn = sp.turn[1:]
			sp.settle(j)
			continue
		}
		c, err := j.plan()
		if err != nil {
			j.fail(err)
			continue
		}
		sp.turn = append(sp.turn[1:], j)
		s := sp.freeSlot(&c)
		if s == nil {
			i++ // the others may go by another chain
			continue
		}
		i = 0
		s.take(j, c)
		s.begin()
	}
	if sp.closing != nil && !sp.closing.told && !slices.ContainsFunc(sp.slots, (*slot).isMoving) {
		sp.closing.told = true
		close(sp.closing.done)
	}
}

// plan is the chain of the next piece.
func (j *stagedJob) plan() (chain, error) {
	local, remote := j.ends()
	if local == nil || remote == nil {
		return chain{}, ErrRevoked // closed since it was submitted
	}
	j.sp.mu.Lock()
	defer j.sp.mu.Unlock()
	c, ok := remote.chains[shape(local.region, j.durable)]
	if !ok {
		return c, errNotPrepared
	}
	return c, nil
}

func (j *stagedJob) ends() (*stagedMemory, *stagedRemote) {
	if j.paged {
		return j.sp.s.memory(j.pages.LocalKey), j.sp.remote(j.pages.RemoteKey)
	}
	return j.sp.s.memory(j.descs[0].LocalKey), j.sp.remote(j.descs[0].RemoteKey)
}

func (sp *stagedPeer) freeSlot(c *chain) *slot {
	for _, s := range sp.slots {
		if s.job == nil && !s.stuck && !s.lost && (!c.far || s.index < sp.there[c.by].slots) {
			return s
		}
	}
	return nil
}

// settle completes a batch of which nothing is left.
func (sp *stagedPeer) settle(j *stagedJob) {
	if j.flying > 0 || j.more() || sp.jobs[j.tag] != j {
		return
	}
	delete(sp.jobs, j.tag)
	sp.pending.Add(-1)
	sp.s.complete(j.tag, j.outcome())
}

var errNotPrepared = fmt.Errorf("the way between the two memories was not prepared: Reset the "+
	"transfer and Add anew: %w", ErrNoRoute)

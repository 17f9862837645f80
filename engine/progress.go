// SPDX-License-Identifier: Apache-2.0

package engine

import "github.com/sluicehq/sluice/driver"

// batchBytesMax bounds what one batch moves, so that a long transfer is seen to make progress.
// Only a single entry of a pattern may be longer.
const batchBytesMax = 64 << 20

// lenMax is the longest piece that goes to the connection.
func (c *conn) lenMax() uint64 {
	if most := c.lane.caps.LenMax; most > 0 && most < batchBytesMax {
		return most
	}
	return batchBytesMax
}

// entriesMax is how many entries of a pattern go in one batch.
func (c *conn) entriesMax(p *Pattern) int {
	return min(c.lane.caps.RunsMax/p.Runs(), int(max(1, batchBytesMax/p.EntryLen())))
}

// nextBatch is how many pieces go in one batch: the first ones of a list that is not empty.
func (c *conn) nextBatch(list []driver.Desc) int {
	most, bytes := min(len(list), c.lane.caps.DescsMax), uint64(0)
	for n := range most {
		if bytes += list[n].Len; bytes > batchBytesMax && n > 0 {
			return n
		}
	}
	return most
}

// progress has the time of a post begin anew: one of its batches has ended well, and others
// have not. One that is being ended is not given more.
func (t *Transfer) progress(generation uint64) {
	was := t.deadline.Load()
	w := t.look()
	if w.phase() != posted || w.generation() != generation || w.has(cancelled) {
		return
	}
	// Where cancelled was set since, its deadline stands, or is about to be stored.
	t.deadline.CompareAndSwap(was, int64(t.e.now()+t.e.cfg.TransferTimeout))
}

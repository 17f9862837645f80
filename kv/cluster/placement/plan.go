// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"bytes"
	"cmp"
	"iter"
	"slices"
	"time"
)

// Held is a segment of which a node has blocks.
type Held struct {
	Segment Key
	First   int    // index in its chain of the segment's first block, see SegmentOf
	Bytes   int64  // of the blocks that the node has
	Heat    uint64 // how much it is read; any measure for which more is hotter
	Owners  int    // how many it has; less than 1 counts as 1
}

// Move is a segment that a node should send to another one.
type Move struct {
	Held
	To uint64
}

// Plan returns what node self should send when the nodes of a cluster change from before to after,
// in the order in which it should send it: the hottest segments first, and of those equally hot the
// ones nearest to the head of their chains, without which later ones are of no use.
//
// Each segment is sent to the owners that it gains, by one node: the best of its former owners that
// is still there. A node that leaves in an orderly way stays in after with weight 0 until it has
// sent everything; a node that was lost is not in after, so that the next of several owners sends.
// Copies that are no longer owned are surplus, see Rank. Until it has a segment a new owner answers
// that it does not have it; then the former owner does, which is the next in the order of Owners.
// Where the nodes change again before all has been sent, before stays what it was at the first
// change: it names the nodes that have the segments.
func Plan(before, after []Node, self uint64, held iter.Seq[Held]) (moves []Move) {
	present := make(map[uint64]bool, len(after))
	for _, n := range after {
		present[n.ID] = true
	}
	var former, owners []int
	for h := range held {
		n := max(h.Owners, 1)
		former = Owners(former[:0], before, h.Segment, n)
		sends := false
		for _, i := range former {
			if present[before[i].ID] {
				sends = before[i].ID == self
				break
			}
		}
		if !sends {
			continue
		}
		owners = Owners(owners[:0], after, h.Segment, n)
		for _, i := range owners {
			to := after[i].ID
			if !slices.ContainsFunc(former, func(f int) bool { return before[f].ID == to }) {
				moves = append(moves, Move{h, to})
			}
		}
	}
	slices.SortFunc(moves, func(a, b Move) int {
		return cmp.Or(cmp.Compare(b.Heat, a.Heat), cmp.Compare(a.First, b.First),
			bytes.Compare(a.Segment[:], b.Segment[:]), cmp.Compare(a.To, b.To))
	})
	return moves
}

// Handover gives out the moves of a plan at a bounded rate. Each node sends to each other one at
// the same part of the rate, so that no node sends or receives more than the rate in all, whichever
// of them joins, leaves or is lost: a node that joins empty fills at the rate, and a node's loss is
// made good by all the others together.
type Handover struct {
	bytesASecond float64 // from this node to one other
	queues       []*handoverQueue
}

// handoverQueue has the moves to one node.
type handoverQueue struct {
	moves []Move
	next  time.Duration // when the next move may begin
}

// NewHandover returns a Handover of a plan of node self. A node may send, and may receive,
// bytesASecond. now is a time on the clock of the calls of Next.
func NewHandover(moves []Move, after []Node, self uint64, bytesASecond float64,
	now time.Duration) *Handover {
	if !(bytesASecond >= 1) { // 0, or no number
		bytesASecond = 1
	}
	h := &Handover{bytesASecond: bytesASecond / float64(max(len(after)-1, 1))}
	by := map[uint64]*handoverQueue{}
	for _, m := range moves {
		if by[m.To] == nil {
			// The senders to one node do not begin all at once.
			delay := float64(mix(self^mix(m.To))>>11) / (1 << 53)
			by[m.To] = &handoverQueue{next: now + time.Duration(delay*float64(h.durationOf(m)))}
			h.queues = append(h.queues, by[m.To])
		}
		by[m.To].moves = append(by[m.To].moves, m)
	}
	return h
}

// durationOf returns how long a move takes at the rate to one node.
func (h *Handover) durationOf(m Move) time.Duration {
	took := float64(max(m.Bytes, 0)) / h.bytesASecond * float64(time.Second)
	return time.Duration(min(took, float64(handoverMax)))
}

// Next returns the next move, which the node should begin now. If wait is greater than 0 there is
// none yet, and Next should be called again after it; ok is false once there are no more. A move
// that fails need not be repeated: the segment is then read from its former owner until the new one
// stores it, or it is computed again.
func (h *Handover) Next(now time.Duration) (move Move, wait time.Duration, ok bool) {
	if len(h.queues) == 0 {
		return Move{}, 0, false
	}
	first := 0
	for i, q := range h.queues {
		if q.next < h.queues[first].next {
			first = i
		}
	}
	q := h.queues[first]
	if q.next > now {
		return Move{}, q.next - now, true
	}
	move = q.moves[0]
	if q.moves = q.moves[1:]; len(q.moves) == 0 {
		h.queues = slices.Delete(h.queues, first, first+1)
	}
	q.next = max(q.next, now-handoverBurst) + h.durationOf(move)
	return move, 0, true
}

const (
	// handoverBurst is how far a node that could not call Next in time may catch up.
	handoverBurst = 100 * time.Millisecond
	// handoverMax bounds what one move takes, so that times do not overflow: at 36 years.
	handoverMax = time.Duration(1 << 60)
)

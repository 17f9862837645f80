// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// Class says how urgent the bytes of a Transfer are, to an engine with Config.Schedule.
type Class uint8

// The classes, most urgent first. A Transfer has the first unless Transfer.Schedule says otherwise.
const (
	SwapIn    Class = iota // somebody waits for the bytes: never queued by the schedule
	Prefetch               // they are about to be asked for
	SwapOut                // they make room, or are kept for later
	Replicate              // a further copy
	classes

	// unscheduled is of the hops of chains: the transfer that they are hops of has had its turn.
	unscheduled Class = 255
)

var classNames = [classes]string{"swap-in", "prefetch", "swap-out", "replicate"}

// String returns "swap-in", "prefetch", "swap-out" or "replicate".
func (c Class) String() string {
	if c < classes {
		return classNames[c]
	}
	return fmt.Sprintf("class %d", uint8(c))
}

// Schedule keeps transfers of the lower classes from delaying swap-ins, and from starving one
// another.
//
// Transfers below SwapIn share a budget of bytes in flight for each resource: a peer over one
// backend, or a file that this engine has registered, to and from its own memory. One goroutine of
// the engine, and those in Transfer.Wait for one of them, hand them to the backends, in pieces; a
// piece for which there is no room waits in the engine, at no cost. While a SwapIn is under way
// over the same backend, or with the same file, no new piece of theirs is handed over, unless the
// SwapIn has shown no progress for 250 ms. Room goes to the classes by weight, and within a class
// to the transfer that was posted first. SwapIn itself is never queued here: it is bounded by what
// the program posts.
type Schedule struct {
	// BytesInFlight bounds what a backend has of the lower classes, for each resource. A larger
	// one fills a longer path; a swap-in may find that many bytes before it. Default 2 MiB.
	BytesInFlight int
	// PieceBytes bounds one batch of the lower classes, at most BytesInFlight and 64 MiB. Only a
	// single entry of a pattern may be longer, which then goes alone. Above what the backend
	// copies in Submit (shm.Config.InlineMax), pieces do not hold up the goroutine that ends
	// another transfer. Default: a quarter of BytesInFlight.
	PieceBytes int
	// Weights of the classes below SwapIn, by which room is shared where several want it: none
	// starves while another is served. Default 16, 4 and 1; each is at most 1,048,576.
	Prefetch, SwapOut, Replicate int
	// QueuedMax bounds the transfers below SwapIn that are posted for one resource and not done.
	// Post of one more is ErrBusy. Default 4,096, at most 1,048,576.
	QueuedMax int
}

// complete returns the schedule with its defaults.
func (s Schedule) complete() (Schedule, error) {
	s.BytesInFlight = cmp.Or(s.BytesInFlight, 2<<20)
	for _, f := range []struct {
		name       string
		field      *int
		value, max int
	}{
		{"BytesInFlight", &s.BytesInFlight, 0, 1 << 40},
		{"PieceBytes", &s.PieceBytes, max(1, min(s.BytesInFlight/4, batchBytesMax)),
			min(s.BytesInFlight, batchBytesMax)},
		{"Prefetch", &s.Prefetch, 16, 1 << 20}, {"SwapOut", &s.SwapOut, 4, 1 << 20},
		{"Replicate", &s.Replicate, 1, 1 << 20}, {"QueuedMax", &s.QueuedMax, 4096, 1 << 20},
	} {
		*f.field = cmp.Or(*f.field, f.value)
		if *f.field < 0 || *f.field > f.max {
			return s, fmt.Errorf("config: Schedule.%s is %d, at most %d: %w", f.name, *f.field,
				f.max, ErrBounds)
		}
	}
	return s, nil
}

// ErrExpired is the outcome of a transfer whose deadline passed before any of it was handed to a
// backend: nothing was moved. It is ErrTimeout, too.
var ErrExpired = fmt.Errorf("the deadline passed before its turn, nothing was moved: %w",
	ErrTimeout)

// Schedule sets the class of the transfer, for all later posts, and a deadline by which one of
// them must have begun; zero: none. A post that has not ends with ErrExpired,
// wherever it waits. One that has begun is
// bounded by Config.TransferTimeout and Abort alone. An engine without Config.Schedule keeps
// neither. It is ErrBusy while posted, and where the class of a transfer with a list is to change:
// Reset it first, as the class decides into which pieces a list is cut.
func (t *Transfer) Schedule(class Class, deadline time.Time) error {
	switch {
	case class >= classes:
		return fmt.Errorf("schedule transfer: %v: want one of the constants: %w", class,
			ErrNotSupported)
	case !t.state().atRest() || t.isUnproven():
		return t.misuse("schedule")
	case class != t.class && len(t.groups) > 0:
		return fmt.Errorf("schedule transfer: it has a list of class %v: Reset it first: %w",
			t.class, ErrBusy)
	}
	if class != t.class {
		t.class, t.grants = class, nil
		if t.e.schedule != nil && class != SwapIn {
			t.grants = &grants{}
		}
	}
	expires := time.Duration(0)
	if !deadline.IsZero() {
		expires = cmp.Or(deadline.Sub(t.e.born), -1)
	}
	t.expires.Store(int64(expires))
	return nil
}

// Promote has a post that is under way go on as one of SwapIn, since somebody waits for its bytes
// now: the rest of it goes before all that is queued, which it holds back. It ends with the post.
// Any goroutine may call it, from Post on; behind the end of the post it does nothing.
func (t *Transfer) Promote() {
	if t.grants != nil {
		t.e.schedule.promote(t)
	}
}

// batchMax is how many bytes of the transfer go in one batch.
func (t *Transfer) batchMax() uint64 {
	if t.grants != nil {
		return uint64(t.e.schedule.cfg.PieceBytes)
	}
	return batchBytesMax
}

// Turn is how a post fared with the schedule: see Transfer.Explain.
type Turn struct {
	Class    Class
	Resource string        // "tcp to decode-0", "file kv-0"; empty: not scheduled
	Waited   time.Duration // in the queue of the resource, so far
	Waiting  string        // for what it waits there now; empty: it does not
}

// Explain tells the class of the transfer, by which resource it is scheduled, and how long its last
// post has waited for that. Like Add it belongs to the goroutine that the transfer belongs to.
func (t *Transfer) Explain() Turn {
	x, r, s := Turn{Class: t.class}, t.resource, t.e.schedule
	if r == nil {
		return x
	}
	x.Resource = r.name
	if t.grants == nil {
		return x
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	x.Waited = t.grants.waited
	if t.queuedFor.Load() != nil {
		x.Waited += s.e.now() - t.grants.since
		x.Waiting = fmt.Sprintf("%d of %d bytes are in flight", r.inFlight, s.cfg.BytesInFlight)
		if r.swapIns.Load() > 0 {
			x.Waiting = "a swap-in is under way"
		}
	}
	return x
}

// ClassStats counts the transfers of a class since the engine was opened; Queued is of now.
type ClassStats struct {
	Posts   uint64
	Queued  int           // transfers that wait for their resource
	Waited  time.Duration // of all, in such queues
	Expired uint64        // ended with ErrExpired
	Refused uint64        // by Post, since its resource had too many
}

// stats returns the counters; nil where there is no schedule.
func (s *scheduler) stats() []ClassStats {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	list := slices.Clone(s.counts[:])
	list[SwapIn].Posts = s.swapIns.Load()
	return list
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"math/bits"
	"slices"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// Transfer is a list of copies with one completion. It is made once and posted many times: idle,
// posted, done, posted again. Done, Advance, Err, Wait, Abort and Completed may be called from any
// goroutine; all other methods belong to one at a time. Misuse is an error, ErrBusy while posted.
type Transfer struct {
	e      *Engine
	p      *Peer
	op     Op
	route  Route
	slot   int
	quiet  bool    // counted in no statistics
	extras *extras // nil: none

	class   Class
	expires atomic.Int64 // when a post must have begun; 0: whenever it does
	grants  *grants      // nil: none, by class or without a schedule

	transferList
	transferFlight
	transferOutcome
}

// transferList holds the pieces of a transfer and the notification behind them. Only the goroutine
// that the transfer belongs to changes it, and only at rest.
type transferList struct {
	groups   []group       // by connection
	lists    []uint32      // of patterns over leases of ranges: see copyFarLists
	loops    []driver.Loop // the same
	regions  []*Region
	remotes  []*Remote
	resource *resource // of the first entry; nil: no schedule concerns it
	message  []byte    // beginning with its kind
	text     []byte    // the program's notification, by reference
	frame    []byte    // room for its message
	parts    []byte    // the same in parts
	notify   bool      // message follows the data
	dirty    bool      // the list has changed since batches was made
	batches  []batch
	bytes    uint64
	conns    atomic.Pointer[[]*conn] // that the batches use; never changed in place
}

// transferFlight is how far the last post has come.
type transferFlight struct {
	submitted      atomic.Int64  // index of the next batch to submit; moved by the submitter alone
	remaining      atomic.Int64  // batches that have not ended
	outstanding    atomic.Uint64 // a bit for each batch with the backend
	waitingForRoom atomic.Bool   // parked: see parkUntilProgress
	pins           atomic.Int32  // goroutines that look at the batches; Post waits for 0
	deadline       atomic.Int64
	postedAt       time.Duration

	queuedFor atomic.Pointer[resource]     // nil: it is in no queue of the schedule
	holds     atomic.Pointer[atomic.Int64] // the count of swap-ins that has it; nil: none
}

// transferOutcome is the outcome of the last post, and the goroutines that wait for it.
type transferOutcome struct {
	stateWord atomic.Uint64 // a state
	cause     atomic.Pointer[cause]

	lastUnanswered atomic.Uint64 // generation of the last post that ended so; 0: none

	completed chan struct{}
	sleepers  sleepers
}

// NewTransfer makes an empty transfer towards a peer. A zero Route lets the
// engine choose; Route.Only names the one backend that may serve it.
func (e *Engine) NewTransfer(p *Peer, op Op, route Route) (*Transfer, error) {
	t := &Transfer{e: e, p: p, op: op, route: route}
	t.completed = make(chan struct{}, 1)
	if err := t.admit(); err != nil {
		return nil, &OpError{Op: "new transfer", Peer: p.name, Err: err}
	}
	p.transfers.Add(1)
	return t, nil
}

// admit checks a new transfer, and takes its slot.
func (t *Transfer) admit() error {
	switch err := t.route.check(t.e); {
	case t.op != Read && t.op != Write:
		return fmt.Errorf("%v is neither Read nor Write: %w", t.op, ErrNotSupported)
	case t.op == Read && t.route.Durable:
		return fmt.Errorf("Route.Durable is for writes: %w", ErrNotSupported)
	case t.p.e != t.e:
		return fmt.Errorf("the peer belongs to another engine: %w", ErrNoRoute)
	case err != nil:
		return err
	case t.e.isClosing():
		return ErrClosed
	case !t.e.slots.acquire(t):
		return fullError("transfers", t.e.cfg.TransfersMax, "TransfersMax")
	}
	return nil
}

// via returns the connections in use.
func (t *Transfer) via() []*conn {
	if list := t.conns.Load(); list != nil {
		return *list
	}
	return nil
}

func (t *Transfer) poll() {
	for _, c := range t.via() {
		c.lane.poll()
	}
}

// Reset empties the list, so that the transfer can be filled anew.
func (t *Transfer) Reset() error {
	from := t.state()
	if !from.atRest() || !t.swap(from, from&^phaseMask|idle) {
		return t.misuse("reset")
	}
	t.release()
	return nil
}

func (t *Transfer) release() {
	if t.isUnproven() {
		return // a backend may still write there: the regions stay busy
	}
	for i, r := range t.regions {
		r.unuse()
		t.regions[i] = nil
	}
	t.regions = t.regions[:0]
	for i, m := range t.remotes {
		m.unuse()
		t.remotes[i] = nil
	}
	t.remotes = t.remotes[:0]
	for i := range t.groups {
		t.groups[i].clear()
	}
	t.resource = nil
	t.groups, t.lists, t.loops = t.groups[:0], t.lists[:0], t.loops[:0]
	t.message, t.text, t.notify, t.dirty, t.bytes = nil, nil, false, true, 0
}

// Close gives the transfer back. It is ErrBusy while posted: Abort it first.
func (t *Transfer) Close() error {
	for {
		from := t.state()
		if from.phase() == closed {
			return nil
		}
		if !from.atRest() {
			return t.misuse("close")
		}
		if t.swap(from, from&^phaseMask|closed) {
			break
		}
	}
	t.release()
	if t.unended() == 0 {
		t.e.slots.free(t)
	}
	t.p.transfers.Add(-1)
	t.p.closeIfUnused()
	return nil
}

// isUnproven reports whether the transfer was given up: a backend may still use its memory.
func (t *Transfer) isUnproven() bool { return t.state().has(unproven) }

// unended counts the batches of a transfer that was given up which its backends still have: their
// bytes may land until they end after all. Those of chains alone do not count, as their hops are
// transfers themselves.
func (t *Transfer) unended() int {
	if !t.isUnproven() || !slices.ContainsFunc(t.via(), func(c *conn) bool {
		return c.lane != t.e.stager.lane
	}) {
		return 0
	}
	return bits.OnesCount64(t.outstanding.Load())
}

func (t *Transfer) misuse(verb string) error {
	if t.isUnproven() {
		return fmt.Errorf("%s transfer: it was given up without proof: Close it: %w", verb, ErrBusy)
	}
	switch t.state().phase() {
	case preparing, posted, ending:
		return fmt.Errorf("%s transfer: it is posted: Wait for it or Abort it first: %w", verb,
			ErrBusy)
	case closed:
		return fmt.Errorf("%s transfer: %w", verb, ErrClosed)
	}
	return fmt.Errorf("%s transfer: it is not posted: %w", verb, ErrBusy)
}

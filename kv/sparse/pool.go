// SPDX-License-Identifier: Apache-2.0

// Package sparse keeps the entries of a KV cache that sparse attention asks for in a pool of few
// slots near the card, and the others in memory that has room for all. docs/sparse.md has the why.
//
// A set is a sequence and a layer, or a few layers that share their top-k. For each step of decode
// and each set the program has the numbers of the entries that attention will read. Step.Lookup
// finds their slots and gives those that are not in the pool the slots of others; Step.Fetch begins
// to bring the bytes, all of a layer by one pattern; meanwhile the program may read what was there;
// Step.Wait returns when all is.
package sparse

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/sluicehq/sluice/csrc/sparse"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// The types of lists; csrc/sparse tells what they mean.
type (
	Batch  = sparse.Batch
	Misses = sparse.Misses
)

// None is no entry, as in a list that is not full, and the slot of it.
const None = sparse.None

// Config of a Pool.
type Config struct {
	Engine *engine.Engine
	Memory *engine.Region // of the slots: device memory, or for tests that of the host
	Base   uint64         // bytes in Memory: of the first slot
	Entry  uint64         // bytes: 656, 584, 576, 132, any multiple of 4
	Stride uint64         // bytes from one slot to the next; 0: Entry
	Sets   int
	Slots  int // of a set; rounded up to 16, at least 32
	Layers int // that share a lookup, each with slots of its own; 0: 1
}

// Pool has the slots of many sets. Goroutines may use different sets at a time; a Step is one
// goroutine's, and a set is in one Step at a time: driver.ErrBusy otherwise.
type Pool struct {
	cfg    Config
	table  *sparse.Table
	stride uint64
	owners []atomic.Pointer[Step] // by set: the step whose misses have not come yet
	broken atomic.Pointer[error]  // a transfer whose end is not proved
}

// New makes a pool in which nothing is.
func New(cfg Config) (*Pool, error) {
	p := &Pool{cfg: cfg, stride: cfg.Stride}
	if p.stride == 0 {
		p.stride = cfg.Entry
	}
	if p.cfg.Layers == 0 {
		p.cfg.Layers = 1
	}
	switch {
	case cfg.Engine == nil || cfg.Memory == nil:
		return nil, errors.New("sparse pool: name Engine and Memory")
	case cfg.Entry == 0 || cfg.Entry%4 != 0 || p.stride < cfg.Entry:
		return nil, fmt.Errorf("sparse pool: entries of %d bytes, %d apart: want a multiple of 4, "+
			"and no less apart: %w", cfg.Entry, p.stride, driver.ErrBounds)
	case cfg.Layers < 0:
		return nil, fmt.Errorf("sparse pool: %d layers: %w", cfg.Layers, driver.ErrBounds)
	}
	var err error
	if p.table, err = sparse.New(cfg.Sets, cfg.Slots); err != nil {
		return nil, fmt.Errorf("sparse pool: %w", err)
	}
	have, slots := cfg.Memory.Size(), uint64(p.table.Slots())*uint64(cfg.Sets)
	if cfg.Base > have || p.stride > (have-cfg.Base)/slots/uint64(p.cfg.Layers) {
		return nil, fmt.Errorf("sparse pool: %d layers of %d slots, %d bytes apart, from %d on, "+
			"the region has %d: %w", p.cfg.Layers, slots, p.stride, cfg.Base, have,
			driver.ErrBounds)
	}
	p.owners = make([]atomic.Pointer[Step], cfg.Sets)
	return p, nil
}

// Slots returns the number of slots of one set.
func (p *Pool) Slots() int { return p.table.Slots() }

// Bytes returns what the slots take in Memory.
func (p *Pool) Bytes() uint64 { return p.layerBytes() * uint64(p.cfg.Layers) }

func (p *Pool) layerBytes() uint64 {
	return uint64(p.table.Slots()) * uint64(p.cfg.Sets) * p.stride
}

// At returns where a slot lies in Memory, for a layer of those that share a lookup.
func (p *Pool) At(layer int, slot uint32) uint64 {
	return p.cfg.Base + uint64(layer)*p.layerBytes() + uint64(slot)*p.stride
}

// resetting owns sets while Reset empties them.
var resetting Step

// Reset empties a set, as when its sequence has ended. While a step has missed entries of it that
// have not come it is driver.ErrBusy.
func (p *Pool) Reset(set uint32) error {
	if uint64(set) >= uint64(p.cfg.Sets) {
		return fmt.Errorf("reset set %d of %d: %w", set, p.cfg.Sets, driver.ErrBounds)
	}
	owner := &p.owners[set]
	if !owner.CompareAndSwap(nil, &resetting) {
		return fmt.Errorf("reset set %d: a step has missed entries of it: Wait for that one, or "+
			"close it: %w", set, driver.ErrBusy)
	}
	testpoint.At("sparse: reset")
	p.table.Reset(set)
	owner.Store(nil)
	return nil
}

// Step is one lookup of some sets, and the transfer of what it missed. It is used again and again.
type Step struct {
	Batch  Batch  // what Lookup asks; set before
	Misses Misses // of Lookup

	// Page is how many bytes further block 1 of Batch.Blocks begins than block 0; 0: as many as the
	// entries of a block take. With another one Misses.From is in units of the greatest divisor
	// that it has in common with the stride.
	Page uint64
	// Pins keep the memory where all entries lie as it is while Fetch or Store moves bytes; set
	// before.
	Pins []Holder

	pool     *Pool
	from     *engine.Remote
	stride   uint64
	unit     uint64 // bytes that Misses.From counts
	read     *engine.Transfer
	write    *engine.Transfer
	underWay *engine.Transfer // nil: none
	releases []func()         // of Pins
	owed     bool             // the slots of Misses have not got their bytes
	sets     []uint32         // whose owner it is
}

// Holder is a cache.Pin: nobody else gets its memory from a Hold that succeeds until release.
type Holder interface {
	Hold() (release func(), err error)
}

// NewStep makes a step whose entries lie in a region of a peer, stride bytes apart; engine.Self is
// the peer of this process's own memory.
func (p *Pool) NewStep(peer *engine.Peer, from *engine.Remote, stride uint64,
	route engine.Route) (s *Step, err error) {
	if stride < p.cfg.Entry {
		return nil, fmt.Errorf("sparse pool: entries of %d bytes, %d apart where all lie: %w",
			p.cfg.Entry, stride, driver.ErrBounds)
	}
	s = &Step{pool: p, from: from, stride: stride, unit: stride}
	if s.read, err = p.cfg.Engine.NewTransfer(peer, engine.Read, route); err != nil {
		return nil, err
	}
	if s.write, err = p.cfg.Engine.NewTransfer(peer, engine.Write, route); err != nil {
		return nil, errors.Join(err, s.read.Close())
	}
	return s, nil
}

// Lookup finds the slots of Batch.Entries, and gives those that are in none the slots of the ones
// that have not been used for longest. Misses has what is to be brought: until Fetch or Store, and
// Wait, have returned nil, its slots have other bytes, and the sets are this Step's. What was not
// brought by the next Lookup is missed again. An error of this one has brought nothing into the
// pool.
func (s *Step) Lookup() error {
	if err := s.check(); err != nil {
		return err
	}
	if s.owed {
		s.forget()
	}
	err := s.lookup()
	if !s.owed {
		s.releaseSets()
	}
	return err
}

func (s *Step) check() error {
	if s.underWay != nil {
		return fmt.Errorf("look up: the step before is under way: Wait first: %w", driver.ErrBusy)
	}
	if broken := s.pool.broken.Load(); broken != nil {
		return fmt.Errorf("the end of a transfer into this pool is not proved: close its region, "+
			"and make another: %w", *broken)
	}
	return nil
}

func (s *Step) lookup() error {
	err := s.setUnit()
	if err == nil {
		err = s.claimSets()
	}
	if err != nil {
		s.Misses.Slots, s.owed = s.Misses.Slots[:0], false
		return err
	}
	err = s.pool.table.Lookup(&s.Batch, &s.Misses)
	s.owed = len(s.Misses.Slots) > 0
	s.countUnits()
	return err
}

// strideMax bounds what is computed with in 64 bits.
const strideMax = 1 << 31

func (s *Step) setUnit() error {
	s.unit = s.stride
	if s.Page == 0 {
		return nil
	}
	if s.Page > strideMax || s.stride > strideMax {
		return fmt.Errorf("look up: pages of %d bytes, entries %d apart, at most %d: %w", s.Page,
			s.stride, strideMax, driver.ErrBounds)
	}
	for rest := s.Page; rest > 0; {
		s.unit, rest = rest, s.unit%rest
	}
	return nil
}

// countUnits has From count units where blocks do not lie one behind the other.
func (s *Step) countUnits() {
	if s.Page == 0 {
		return
	}
	page, entry := s.Page/s.unit, s.stride/s.unit
	for i, from := range s.Misses.From {
		at := uint64(from>>s.Batch.Shift)*page + uint64(from&(1<<s.Batch.Shift-1))*entry
		if from == None || at >= uint64(None) {
			at = uint64(None)
		}
		s.Misses.From[i] = uint32(at)
	}
}

// claimSets reserves the sets of the batch for this step until releaseSets.
func (s *Step) claimSets() error {
	for _, set := range s.Batch.Sets {
		if uint64(set) >= uint64(len(s.pool.owners)) {
			return nil // the table says so
		}
		owner := &s.pool.owners[set]
		if owner.CompareAndSwap(nil, s) {
			s.sets = append(s.sets, set)
		} else if owner.Load() != s {
			return fmt.Errorf("look up set %d: what another step has missed of it has not come: "+
				"Wait for that one first: %w", set, driver.ErrBusy)
		}
	}
	return nil
}

func (s *Step) releaseSets() {
	for _, set := range s.sets {
		s.pool.owners[set].Store(nil)
	}
	s.sets = s.sets[:0]
}

// Fetch begins to bring what Lookup or Warm missed, for each of the first len(bases) layers: entry
// i of a layer lies at its base + i*stride of the region of NewStep. Wait ends it. If it cannot
// begin, the entries are as if Lookup had not come.
func (s *Step) Fetch(bases ...uint64) error { return s.begin(s.read, bases) }

// Store begins to write what Lookup missed from its slots to where all entries lie. It is for new
// entries, whose bytes the program has put into their slots. Wait ends it.
func (s *Step) Store(bases ...uint64) error { return s.begin(s.write, bases) }

func (s *Step) begin(t *engine.Transfer, bases []uint64) error {
	if s.underWay != nil {
		return fmt.Errorf("the step before is under way: Wait first: %w", driver.ErrBusy)
	}
	if !s.owed { // also once they have come: the slots may be another step's since
		return nil
	}
	p := s.pool
	err := t.Reset()
	if len(bases) == 0 || len(bases) > p.cfg.Layers {
		err = fmt.Errorf("%d bases, the pool has %d layers: %w", len(bases), p.cfg.Layers,
			driver.ErrBounds)
	}
	if err == nil && slices.Contains(s.Misses.From, None) {
		err = fmt.Errorf("an entry lies further than 32 bits count units of %d bytes: take a "+
			"stride that has a greater divisor in common with the page: %w", s.unit,
			driver.ErrBounds)
	}
	for layer, base := range bases {
		if err != nil {
			break
		}
		err = t.AddPattern(p.cfg.Memory, s.from, engine.Pattern{
			Run: p.cfg.Entry, Count: len(s.Misses.Slots),
			Local:  engine.Side{Base: p.At(layer, 0), Stride: p.stride, List: s.Misses.Slots},
			Remote: engine.Side{Base: base, Stride: s.unit, List: s.Misses.From},
		})
	}
	if err == nil {
		err = s.holdPins()
	}
	if err == nil {
		err = t.Post()
	}
	if err != nil {
		s.releasePins()
		s.forget()
		return err
	}
	s.underWay = t
	return nil
}

// holdPins keeps the memory of the Pins until the fetch has ended.
func (s *Step) holdPins() error {
	for _, pin := range s.Pins {
		release, err := pin.Hold()
		if err != nil {
			return fmt.Errorf("keep the entries in their places: %w", err)
		}
		s.releases = append(s.releases, release)
	}
	return nil
}

func (s *Step) releasePins() {
	for _, release := range s.releases {
		release()
	}
	s.releases = s.releases[:0]
}

// Done is signalled when what Fetch or Store began has ended, for Wait; nil: nothing is under way.
func (s *Step) Done() <-chan struct{} {
	if s.underWay == nil {
		return nil
	}
	return s.underWay.Completed()
}

// OnDone has f called when what Fetch or Store begins from then on has ended, for a program that
// serves many steps from one place; engine.Transfer.OnDone says what f may do. driver.ErrBusy while
// something is under way.
func (s *Step) OnDone(f func()) error { return errors.Join(s.read.OnDone(f), s.write.OnDone(f)) }

// Wait returns when what Fetch or Store began has ended, copying along where it can; at once if
// nothing is under way. Behind an error the pool has none of the entries. That of ctx alone leaves
// the transfer under way, for another Wait or for Abort.
func (s *Step) Wait(ctx context.Context) error {
	if s.underWay == nil {
		return nil
	}
	err := s.underWay.Wait(ctx)
	if err != nil && !s.underWay.Done() {
		return err
	}
	return s.end(ctx)
}

// Abort ends what is under way: behind nil no byte of it lands any more, on either side, and the
// pool has none of the entries.
func (s *Step) Abort(ctx context.Context) error {
	if s.underWay == nil {
		return nil
	}
	if err := s.underWay.Abort(ctx); err != nil && !s.underWay.Done() {
		return err
	}
	t := s.underWay
	if t.Err() == nil { // it had ended before
		s.underWay = nil
		s.releasePins()
		s.forget()
		return nil
	}
	err := s.end(ctx)
	if proof := t.Abort(ctx); proof != nil || !errors.Is(err, driver.ErrAborted) {
		return err
	}
	return nil
}

// end takes the outcome of what has ended. Without the proof that nothing lands in the pool any
// more no slot may be another entry's, of any step; without any proof what is held stays so.
func (s *Step) end(ctx context.Context) error {
	t := s.underWay
	s.underWay = nil
	err := t.Err()
	if err == nil {
		s.owed = false
		s.releasePins()
		s.releaseSets()
		return nil
	}
	proof := t.Abort(ctx) // it has ended: this asks how
	if proof != nil {
		err = fmt.Errorf("%w: %w", err, proof)
		s.releases = nil
	}
	s.releasePins()
	if proof != nil && !errors.Is(proof, driver.ErrUnproven) { // that is about the peer's memory
		s.pool.broken.CompareAndSwap(nil, &err)
		return err
	}
	s.forget()
	return err
}

func (s *Step) forget() {
	s.pool.table.Forget(s.Misses.Slots)
	s.Misses.Slots, s.owed = s.Misses.Slots[:0], false
	s.releaseSets()
}

// Warm looks up one window behind the other, each as long as Batch.Slots: the top-k of the last
// queries of a prefill. Then Misses has what of them is in the pool and is to be brought by one
// Fetch, so that the first steps of decode miss no more than later ones.
func (s *Step) Warm(windows ...[]uint32) error {
	type at struct{ slot, entry, from uint32 }
	var all []at
	if err := s.check(); err != nil {
		return err
	}
	if s.owed {
		s.forget()
	}
	for _, window := range windows {
		s.Batch.Entries = window
		if err := s.lookup(); err != nil {
			for _, a := range all {
				s.pool.table.Forget([]uint32{a.slot})
			}
			s.releaseSets()
			return err
		}
		for i, slot := range s.Misses.Slots {
			all = append(all, at{slot, window[s.Misses.Place[i]], s.Misses.From[i]})
		}
	}
	m := &s.Misses
	m.Slots, m.From, m.Place = m.Slots[:0], m.From[:0], m.Place[:0]
	listed := map[uint32]bool{}
	for _, a := range all {
		if s.pool.table.Has(a.slot, a.entry) && !listed[a.slot] {
			listed[a.slot] = true
			m.Slots, m.From = append(m.Slots, a.slot), append(m.From, a.from)
		}
	}
	if s.owed = len(m.Slots) > 0; !s.owed {
		s.releaseSets()
	}
	return nil
}

// Close gives the step's transfers back; what Lookup missed and nothing brought is missed again.
// What is under way is driver.ErrBusy.
func (s *Step) Close() error {
	if s.underWay != nil {
		return fmt.Errorf("close a step under way: Wait or Abort first: %w", driver.ErrBusy)
	}
	if s.owed {
		s.forget()
	}
	return errors.Join(s.read.Close(), s.write.Close())
}

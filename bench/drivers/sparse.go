// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/sparse"
)

// sparseEnd is a pool of package kv/sparse: its slots in a memory of this process, and all entries
// in another one. A read is a Lookup of entries that are not in the pool and their Fetch, a write
// the same and their Store. A match is a Lookup alone, of sets as those of a batch of decode: most
// of the entries that a set is asked for are in the pool.
type sparseEnd struct {
	*engineEnd
	slots *engine.Region // of all pools; nil: nothing was prepared
}

// What a match asks of each set, and what the pool has.
const (
	sparseEntries = 2048
	sparseSlots   = 6400
	sparseContext = 1 << 17 // entries of a sequence
)

func newSparse(args []string) (end, error) {
	return &sparseEnd{engineEnd: &engineEnd{specs: []string{"mem"}}}, noArgs(args)
}

// Open implements bench.End.
func (e *sparseEnd) Open(r *bench.Request) (bench.Answer, error) {
	if err := onlyLane(r, bench.Process); err != nil {
		return bench.Answer{}, err
	}
	a, err := e.engineEnd.Open(r)
	a.Settings = "kv/sparse, lookups included, over " + a.Settings
	return a, err
}

// Keyed implements bench.Keyed.
func (e *sparseEnd) Keyed() {}

// newPosting makes a pool and a step. Each operation begins with an empty set, or moves nothing:
// all pools share their memory.
func (e *sparseEnd) newPosting(op string, entry uint64, sets, slots int) (*sparsePosting, error) {
	slots = max(32, (slots+15)&^15)
	if need := uint64(sets*slots) * entry; e.slots == nil || e.slots.Size() < need {
		m, err := e.eng.Alloc(need, engine.AllocOptions{Purpose: "bench", Populate: true})
		if err != nil {
			return nil, err
		}
		e.owned = append(e.owned, m.Close)
		e.slots, err = e.eng.Register(fmt.Sprint("slots ", len(e.owned)), m.Segment())
		if err != nil {
			return nil, err
		}
	}
	pool, err := sparse.New(sparse.Config{Engine: e.eng, Memory: e.slots, Entry: entry, Sets: sets,
		Slots: slots})
	if err != nil {
		return nil, err
	}
	step, err := pool.NewStep(e.peer, e.remote, entry, engine.Route{})
	return &sparsePosting{step, pool, op}, err
}

// Prepare implements bench.End.
func (e *sparseEnd) Prepare(op string, size uint64, _, remote []int32) (bench.Posting, error) {
	switch {
	case op == bench.OpDurable:
		return nil, errDurable
	case op == bench.OpMatch:
		return e.prepareMatch(len(remote))
	case size%4 != 0:
		return nil, fmt.Errorf("entries have a multiple of 4 bytes: %w", bench.ErrUnsupported)
	}
	n := len(remote)
	p, err := e.newPosting(op, size, 1, 3*n)
	if err != nil {
		return nil, err
	}
	p.Batch = sparse.Batch{Sets: []uint32{0}, Entries: make([]uint32, n), Blocks: unsigned(remote),
		Starts: []uint32{0, uint32(n)}, Slots: make([]uint32, n), Counts: make([]uint32, 1)}
	for i := range p.Batch.Entries {
		p.Batch.Entries[i] = uint32(i)
	}
	if err := e.prove(p, size, remote); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// prove runs an operation, and compares the bytes.
func (e *sparseEnd) prove(p *sparsePosting, size uint64, remote []int32) error {
	for i, s := range remote {
		binary.LittleEndian.PutUint32(slice(e.far, s, size), uint32(i))
	}
	near := e.slots.Bytes()
	for at := uint64(0); at < uint64(len(near)); at += size {
		binary.LittleEndian.PutUint32(near[at:], ^uint32(at/size))
	}
	if err := p.Post(context.Background()); err != nil {
		return err
	}
	for i, slot := range p.Batch.Slots {
		here, want := slice(near, int32(slot), size), uint32(i)
		if p.op == bench.OpWrite {
			want = ^slot
		}
		if binary.LittleEndian.Uint32(here) != want ||
			!bytes.Equal(here, slice(e.far, remote[i], size)) {
			return fmt.Errorf("entry %d has other bytes in its slot: %w", i, bench.ErrNonsense)
		}
	}
	return p.Reset(context.Background())
}

// prepareMatch fills the sets of a pool, as steps of decode do. Then a tenth of what a set is asked
// for changes, and is missed by each match: none fetches it.
func (e *sparseEnd) prepareMatch(n int) (bench.Posting, error) {
	per := min(n, sparseEntries)
	sets, random := n/per, rand.New(rand.NewPCG(1, 1))
	p, err := e.newPosting(bench.OpMatch, 4, sets, sparseSlots)
	if err != nil {
		return nil, err
	}
	b := &p.Batch
	*b = sparse.Batch{Shift: 6, Entries: make([]uint32, sets*per), Slots: make([]uint32, sets*per),
		Counts: make([]uint32, sets)}
	for set := range uint32(sets) {
		b.Sets, b.Starts = append(b.Sets, set), append(b.Starts, uint32(len(b.Blocks)))
		for block := range uint32(sparseContext >> b.Shift) {
			b.Blocks = append(b.Blocks, block%max(uint32(len(e.far)>>b.Shift/4), 1))
		}
	}
	b.Starts = append(b.Starts, uint32(len(b.Blocks)))
	for range 4 {
		for i := range b.Entries {
			b.Entries[i] = random.Uint32N(sparseContext)
		}
		err = errors.Join(p.Lookup(), p.Fetch(0), p.Wait(context.Background()))
		if err != nil {
			return nil, errors.Join(err, p.Close())
		}
	}
	for i := 0; i < len(b.Entries); i += 10 {
		b.Entries[i] = random.Uint32N(sparseContext)
	}
	return p, nil
}

// sparsePosting is an operation with a pool.
type sparsePosting struct {
	*sparse.Step
	pool *sparse.Pool
	op   string
}

// Reset implements bench.Resetter.
func (p *sparsePosting) Reset(context.Context) error {
	if p.op == bench.OpMatch {
		return nil
	}
	return p.pool.Reset(0)
}

// Post implements bench.Posting.
func (p *sparsePosting) Post(ctx context.Context) error {
	err := p.Lookup()
	switch {
	case err != nil || p.op == bench.OpMatch:
		return err
	case p.op == bench.OpWrite:
		err = p.Store(0)
	default:
		err = p.Fetch(0)
	}
	if err != nil {
		return err
	}
	return p.Wait(ctx)
}

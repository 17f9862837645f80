// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sluicehq/sluice/backends/posix"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/handoff"
	"github.com/sluicehq/sluice/kv/pool"
	"github.com/sluicehq/sluice/kv/store"
)

// tier is the file below the pool. It has an engine of its own, so that no peer sees the file,
// and that the rules of --fault, which are for what lies between the processes, leave it alone.
// Blocks go into the file in turn: what is in the way, the oldest, is evicted.
type tier struct {
	offload Offload
	path    string
	checker *checker
	said    func(blocks int) // after each transfer

	store   *store.Store
	backend *posix.Backend
	eng     *engine.Engine
	memory  *engine.Memory // that blocks come back to
	blocks  *engine.Region // the pool
	recall  *engine.Region
	disk    *engine.Remote
	moves   [2]*engine.Transfer // write, read
	base    *fileBaseline

	mu    sync.Mutex
	where map[pool.Hash]uint32 // blocks that the file holds
	next  uint32               // that is written next
	res   OffloadResult
}

// OffloadResult is what became of blocks that were spilled.
type OffloadResult struct {
	Path     string `json:"path"`
	Way      string `json:"way"` // to the file, as the backend explains it
	Blocks   uint64 `json:"blocks"`
	Bytes    uint64 `json:"bytes"` // of the file's blocks
	Attached uint64 `json:"attached"`
	Evicted  uint64 `json:"evicted"`
	Spilled  moved  `json:"spilled"`
	Recalled moved  `json:"recalled"`
}

// moved is one direction, beside plain system calls.
type moved struct {
	Blocks    uint64        `json:"blocks"`
	Bytes     uint64        `json:"bytes"`
	Took      time.Duration `json:"took_ns"`
	BaseBytes uint64        `json:"base_bytes"`
	Base      time.Duration `json:"base_ns"`
}

// newTier opens the file and checks what a kept one holds.
func newTier(ctx context.Context, p *Plan, c *checker, memory *engine.Memory, said func(int)) (
	_ *tier, err error) {
	t := &tier{offload: *p.Offload, checker: c, said: said, where: map[pool.Hash]uint32{}}
	defer func() {
		if err != nil {
			err = fmt.Errorf("offload: %w", errors.Join(err, t.close()))
		}
	}()
	if t.store, t.path, err = t.offload.openStore(c.geometry); err != nil {
		return nil, err
	}
	if err = t.connect(p, memory); err != nil {
		return nil, err
	}
	if t.base, err = newFileBaseline(t.store, t.path, t.batch(), t.offload.Durable); err != nil {
		return nil, err
	}
	t.res.Path, t.res.Blocks = t.path, t.offload.Blocks
	t.res.Bytes = t.offload.Blocks * t.store.Geometry().Stride()
	return t, t.takeStock(ctx)
}

func (t *tier) batch() int { return t.offload.batch(t.checker.geometry) }

// connect makes the engine that moves blocks.
func (t *tier) connect(p *Plan, memory *engine.Memory) (err error) {
	if t.backend, err = posix.New(posix.Config{Durable: t.offload.Durable}); err != nil {
		return err
	}
	t.eng, err = engine.Open(engine.Config{Name: "offload", Backends: []driver.Backend{t.backend},
		TransferTimeout: p.limit()})
	if err != nil {
		return err
	}
	stride := t.store.Geometry().Stride()
	if t.memory, err = engine.Alloc(uint64(t.batch())*stride,
		engine.AllocOptions{Purpose: "kv-recall", Populate: true}); err != nil {
		return fmt.Errorf("allocate memory to read back to: %w", err)
	}
	if t.blocks, err = t.eng.Register("blocks", memory.Segment()); err != nil {
		return err
	}
	if t.recall, err = t.eng.Register("recall", t.memory.Segment()); err != nil {
		return err
	}
	if _, err = t.eng.Register("disk", t.store.Segment()); err != nil {
		return err
	}
	self, err := t.eng.Self()
	if err != nil {
		return err
	}
	if t.disk, err = self.Remote("disk"); err != nil {
		return err
	}
	for i, op := range []engine.Op{engine.Write, engine.Read} {
		if t.moves[i], err = t.eng.NewTransfer(self, op, engine.Route{Only: "posix"}); err != nil {
			return err
		}
	}
	x, err := t.eng.Explain(self, t.blocks, t.disk)
	for i := range x.Candidates {
		if x.Candidates[i].Backend == "posix" {
			t.res.Way = x.Candidates[i].Reason
		}
	}
	return err
}

// takeStock finds what a kept file holds, and checks it against what its records and its names
// say.
func (t *tier) takeStock(ctx context.Context) error {
	var found []uint32
	last := uint64(0)
	t.store.Each(func(i uint32, b store.Block) bool {
		t.where[pool.Hash(b.Name)] = i
		found = append(found, i)
		if b.Seq > last {
			last, t.next = b.Seq, uint32((uint64(i)+1)%t.offload.Blocks)
		}
		return true
	})
	t.res.Attached = uint64(len(found))
	return t.readBack(ctx, found)
}

// request is told of one that is complete and whose blocks in the pool are right: those that
// the file holds are read back, the others are spilled.
func (t *tier) request(ctx context.Context, q *handoff.Request) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	var known []uint32
	var fresh []int
	seen := map[pool.Hash]bool{}
	for at, h := range q.Hashes {
		if i, ok := t.where[h]; ok {
			known = append(known, i)
		} else if !seen[h] {
			fresh = append(fresh, at)
			seen[h] = true
		}
	}
	if err := t.readBack(ctx, known); err != nil {
		return err
	}
	for n := t.batch(); len(fresh) > 0; {
		part := fresh[:min(n, len(fresh))]
		fresh = fresh[len(part):]
		if err := t.spill(ctx, q, part); err != nil {
			return fmt.Errorf("offload: %w", err)
		}
	}
	return nil
}

// finish reads back all that the file holds, and says what there was.
func (t *tier) finish(ctx context.Context) (*OffloadResult, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []uint32
	t.store.Each(func(i uint32, _ store.Block) bool { all = append(all, i); return true })
	if err := t.readBack(ctx, all); err != nil {
		return nil, err
	}
	return &t.res, nil
}

// close gives back what it holds. A file without a name is gone then.
func (t *tier) close() error {
	var errs []error
	switch {
	case t.eng != nil:
		errs = append(errs, t.eng.Close())
	case t.backend != nil:
		errs = append(errs, t.backend.Close())
	}
	if t.memory != nil {
		errs = append(errs, t.memory.Close())
	}
	if t.base != nil {
		errs = append(errs, t.base.close())
	}
	if t.store != nil {
		errs = append(errs, t.store.Close())
	}
	return errors.Join(errs...)
}

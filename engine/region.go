// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/wire"
)

// Region is a registered range, known to peers by its name.
type Region struct {
	e       *Engine
	name    string
	seg     driver.Segment  // with a dma-buf of our own, since leases register parts later
	mems    []driver.Memory // by lane; nil: that backend does not serve this kind
	private bool            // in no description
	file    *resource       // nil: it is no file, or there is no schedule
	// transfers that list it and leases on it; regionClosed is added on Close
	users atomic.Int64

	ending sync.Mutex      // held while the proof is sought
	left   []driver.Memory // guarded by ending: those of mems that are not revoked
	ended  bool            // guarded by ending

	parts    sync.RWMutex // held while a lease registers a part
	released bool         // guarded by parts: the dma-buf is closed
}

const regionClosed = -1 << 40

// Register makes a segment known under a name that no other region has. Every
// backend that serves its kind registers it; at least one must. The bytes are not
// copied and must stay mapped, or allocated, until the Region is closed. The descriptor
// of a dma-buf may be closed when Register has returned.
func (e *Engine) Register(name string, seg driver.Segment) (*Region, error) {
	return e.register(name, seg, false)
}

// RegisterPrivate is Register of a region that no description tells of: peers
// reach it by leases alone.
func (e *Engine) RegisterPrivate(name string, seg driver.Segment) (*Region, error) {
	return e.register(name, seg, true)
}

// registerHidden is RegisterPrivate under a random name.
func (e *Engine) registerHidden(seg driver.Segment) (*Region, error) {
	return e.register("(hidden) "+rand.Text(), seg, true)
}

// register makes a region known to the engine and to the backends: to all that must know it, or to
// none.
func (e *Engine) register(name string, seg driver.Segment, private bool) (*Region, error) {
	err := wire.CheckName(name)
	if err == nil && name == "" {
		err = fmt.Errorf("region without a name: %w", ErrBounds)
	}
	if err == nil {
		err = seg.Check()
	}
	if err == nil {
		seg.DMABuf, err = hostmem.DupDMABuf(seg.DMABuf)
	}
	if err != nil {
		return nil, &OpError{Op: "register " + name, Err: err}
	}
	r := &Region{e: e, name: name, seg: seg, private: private}
	if seg.Kind == driver.File {
		r.file = e.schedule.newResource("file "+name, new(atomic.Int64))
	}
	if err := e.reserve(r); err != nil {
		_ = hostmem.CloseDMABuf(seg.DMABuf)
		return nil, &OpError{Op: "register " + name, Err: err}
	}
	mems, err := e.registerSegment(seg)
	if err == nil {
		e.mu.Lock()
		if e.closed {
			err = &OpError{Op: "register " + name, Err: ErrClosed}
		} else {
			r.mems = mems // from here on peers may be told of it
		}
		e.mu.Unlock()
		if err != nil {
			err = errors.Join(err, e.revoke(context.Background(), slices.Clone(mems)))
		}
	}
	if err != nil {
		e.forget(r)
		_ = hostmem.CloseDMABuf(seg.DMABuf)
		return nil, err
	}
	return r, nil
}

// registerPart registers a slice of its segment once more.
func (r *Region) registerPart(seg driver.Segment) ([]driver.Memory, error) {
	r.parts.RLock()
	defer r.parts.RUnlock()
	if r.released {
		return nil, &OpError{Op: "register a part of " + r.name, Err: ErrClosed}
	}
	return r.e.registerSegment(seg)
}

func (e *Engine) reserve(r *Region) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.closed:
		return ErrClosed
	case e.regions[r.name] != nil:
		return fmt.Errorf("the name is taken: close that region first or choose another: %w",
			ErrBusy)
	case len(e.regions) >= e.cfg.RegionsMax:
		return fullError("regions", e.cfg.RegionsMax, "RegionsMax")
	}
	e.regions[r.name] = r
	return nil
}

func (e *Engine) forget(r *Region) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.regions[r.name] == r {
		delete(e.regions, r.name)
	}
}

// registerSegment registers with every lane that serves the kind, each time
// under one fresh secret.
func (e *Engine) registerSegment(seg driver.Segment) ([]driver.Memory, error) {
	rand.Read(seg.Secret[:])
	if seg.Only == nil && partOfPages(&seg) {
		seg.Only = driver.Ranges{{Len: seg.Len}} // so that what lies beside it stays
	}
	mems := make([]driver.Memory, len(e.lanes))
	var errs []error
	served := false
	for i, l := range e.lanes {
		if l == e.stager.lane || !l.caps.Pairs.Local().Has(seg.Kind) {
			continue
		}
		m, err := l.b.Register(seg)
		if err != nil {
			errs = append(errs, &OpError{Op: "register", Backend: l.caps.Name, Err: err})
			continue
		}
		mems[i], served = m, true
	}
	if served {
		mems[e.stager.lane.index] = e.stager.register(seg, mems)
		return mems, nil
	}
	if errs == nil {
		errs = append(errs, fmt.Errorf("register: no backend of this engine serves %v: %w",
			seg.Kind, ErrNotSupported))
	}
	return nil, errors.Join(errs...)
}

// partOfPages reports whether a segment begins or ends within a page of memory whose pages a
// backend may replace. The program may write the rest of that page at any moment.
func partOfPages(seg *driver.Segment) bool {
	s, ok := seg.Shared.(interface {
		PageBytes() uint64
		Bytes() []byte
	})
	end := seg.SharedOff + seg.Len
	if ok && end == uint64(len(s.Bytes())) {
		end = 0 // nothing lies behind it
	}
	return ok && (seg.SharedOff|end)%s.PageBytes() != 0
}

// overCtx is over: a Revoke by it ends the epoch, and has its proof if that takes no waiting.
var overCtx = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// revoke ends every memory, of all backends at once. On an error every epoch has ended all the
// same; the memories without a proof stay on the list, which is the caller's own, as the stager's
// memory looks at the first. So the caller may look for the proof again.
func (e *Engine) revoke(ctx context.Context, mems []driver.Memory) error {
	errs := make([]error, len(mems))
	one := func(ctx context.Context, i int) {
		errs[i] = nil
		if err := mems[i].Revoke(ctx); err != nil {
			errs[i] = &OpError{Op: "revoke", Backend: e.lanes[i].caps.Name, Err: err}
			return
		}
		mems[i] = nil
	}
	// Most wait for nothing: a goroutine of its own is for a memory that must.
	for i, m := range mems {
		if m != nil {
			one(overCtx, i)
		}
	}
	var all sync.WaitGroup
	for i := range errs {
		if errs[i] != nil {
			all.Go(func() { one(ctx, i) })
		}
	}
	all.Wait()
	return errors.Join(errs...)
}

// Name returns the name under which peers find it.
func (r *Region) Name() string { return r.name }

// Size returns its length in bytes.
func (r *Region) Size() uint64 { return r.seg.Len }

// Kind returns where its bytes live.
func (r *Region) Kind() driver.Kind { return r.seg.Kind }

// Bytes returns the memory itself; nil unless it is DRAM.
func (r *Region) Bytes() []byte { return r.seg.Mem }

// Segment returns the segment that was registered, for a second registration of a part of it. The
// descriptor of its dma-buf is the Region's, until Close.
func (r *Region) Segment() driver.Segment { return r.seg }

// use takes a reference for a transfer or a lease.
func (r *Region) use() error {
	if r.users.Add(1) <= 0 {
		r.users.Add(-1)
		return fmt.Errorf("region %s: %w", r.name, ErrClosed)
	}
	return nil
}

func (r *Region) unuse() { r.users.Add(-1) }

// Close revokes the region, so that no peer can reach it any more, and forgets it.
// It is ErrBusy while a Transfer lists it (Reset or Close that first) or a Lease
// on it stands (Revoke it first; Close itself looks for the proof of those that were revoked
// without one). When it fails within AbortGrace the region is of no use any more, keeps its name,
// and Close may be called again.
func (r *Region) Close() error { return r.release(false) }

// release revokes and forgets the region; though transfers list it, where that is said. A call that
// comes meanwhile waits for the outcome.
func (r *Region) release(thoughUsed bool) error {
	r.ending.Lock()
	defer r.ending.Unlock()
	if r.ended {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), r.e.cfg.AbortGrace)
	defer cancel()
	var unproven error
	if !thoughUsed {
		unproven = r.endRevoked(ctx)
	}
	if !r.users.CompareAndSwap(0, regionClosed) && r.users.Load() >= 0 {
		if !thoughUsed {
			return &OpError{Op: "close region " + r.name, Err: errors.Join(
				fmt.Errorf("reset the transfers that list it and revoke its leases first: %w",
					ErrBusy), unproven)}
		}
		r.users.Add(regionClosed)
	}
	if r.left == nil {
		r.left = slices.Clone(r.mems)
	}
	if err := r.e.revoke(ctx, r.left); err != nil {
		return err
	}
	r.ended = true
	r.e.forget(r)
	r.e.forgetOwn(r)
	r.parts.Lock() // no lease registers a part
	defer r.parts.Unlock()
	r.released = true
	if err := hostmem.CloseDMABuf(r.seg.DMABuf); err != nil {
		return &OpError{Op: "close region " + r.name, Err: err}
	}
	return nil
}

// Memory is host memory outside the Go heap for regions, which other processes of this host can
// map. All methods may be called from any goroutine.
type Memory struct{ of *hostmem.Buffer }

// Bytes returns the memory, nil after Close. It must not be used after Close.
func (m *Memory) Bytes() []byte { return m.of.Segment().Mem }

// Segment returns what Engine.Register takes.
func (m *Memory) Segment() driver.Segment { return m.of.Segment() }

// Close gives the memory back. Close the regions on it first, or their engine. It
// is idempotent.
func (m *Memory) Close() error { return m.of.Close() }

// HostSegment makes a segment of memory that the program has from elsewhere. It
// must stay mapped and must not move, which rules out a slice that the Go heap
// may reclaim. Peers of this host then reach it by process_vm_readv, several times
// slower for small pieces than memory of Alloc.
func HostSegment(b []byte) driver.Segment {
	return driver.Segment{Kind: driver.DRAM, Mem: b, Len: uint64(len(b))}
}

// AllocOptions say which memory. The zero value is useful.
type AllocOptions struct {
	Purpose  string // what it is for, in errors of tests that look for leaks
	Node     int    // NUMA node plus one; 0: any
	NoHuge   bool   // ordinary pages only
	Populate bool   // find all pages now, huge ones where there are: no page fault later
}

// Alloc returns n zeroed bytes of host memory at an address that is a multiple of 2 MiB, in
// reserved huge pages where there are some, in transparent ones otherwise. It suits every backend:
// peers of this host map it.
func Alloc(n uint64, o AllocOptions) (*Memory, error) {
	huge := hostmem.HugeAuto
	if o.NoHuge {
		huge = hostmem.HugeNone
	}
	b, err := hostmem.Alloc(n, hostmem.Options{Purpose: o.Purpose, Node: o.Node, Huge: huge,
		Populate: o.Populate})
	if err != nil {
		return nil, &OpError{Op: "allocate", Err: err}
	}
	return &Memory{of: b}, nil
}

// Alloc is the package function, or ErrClosed once the engine is closed. The memory outlives the
// engine: close it after its regions, before the engine's Close or after it.
func (e *Engine) Alloc(n uint64, o AllocOptions) (*Memory, error) {
	e.mu.Lock()
	closed := e.closed
	e.mu.Unlock()
	if closed {
		return nil, &OpError{Op: "allocate", Err: ErrClosed}
	}
	return Alloc(n, o)
}

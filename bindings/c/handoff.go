// SPDX-License-Identifier: Apache-2.0

package main

// #include "faces.h"
import "C"

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/handoff"
	"github.com/sluicehq/sluice/kv/layout"
)

// Hand-over between groups of ranks, of a program in C or Python. Handles (handles.go) name two
// things: a rank of a group, and a request on it.
//
// What arrives: calls of sluice.h, through calls_handoff.c. An open reads the plan of both groups
// and all lists. A begin copies the block tables, starts a goroutine and returns; a layer goes to
// that goroutine by a channel that has room for all layers. It makes the calls of package handoff
// that wait, so that no call of the program does.
//
// What leaves: one outcome a request, told as that of an operation of a cache (ending.go), and the
// proof that its blocks are free, which an abort waits for (groupRequest.free).
//
// The ranks of an engine share a Mux, which has the engine's messages from the first open to the
// last close. What a peer can have a rank keep is what package handoff bounds.

// groupRank is a rank of a group: a sender or a receiver.
type groupRank struct {
	of       *openEngine
	handle   atomic.Uint64
	sender   *handoff.GroupSender   // nil: it receives
	receiver *handoff.GroupReceiver // nil: it sends
	layers   []int                  // that it has, in order

	closing sync.Mutex // one close at a time
	ended   bool       // guarded by closing: nothing of package handoff is left of it

	mu       sync.Mutex // guards what follows
	over     bool
	requests map[*groupRequest]uint64 // handles
}

// groupRequest is a request on one rank.
type groupRequest struct {
	of   *groupRank
	stop context.CancelFunc // has it end

	ending       // after which the outcome is there
	err    error // also why its blocks may not be free

	telling sync.Mutex
	told    map[int]bool // layers; guarded by telling
	queue   chan int     // layers; has room for all of them
}

// hearing is the Mux of an engine while it has ranks.
type hearing struct {
	mu    sync.Mutex
	mux   *handoff.Mux
	ranks int
}

// hear returns the Mux. Each call needs a call of unhear.
func (e *openEngine) hear() (*handoff.Mux, error) {
	e.hearing.mu.Lock()
	defer e.hearing.mu.Unlock()
	if e.hearing.ranks == 0 {
		if err := e.inbox.reserve(); err != nil {
			return nil, err
		}
		e.hearing.mux = handoff.NewMux(e.Engine)
	}
	e.hearing.ranks++
	return e.hearing.mux, nil
}

func (e *openEngine) unhear() {
	e.hearing.mu.Lock()
	defer e.hearing.mu.Unlock()
	if e.hearing.ranks--; e.hearing.ranks == 0 {
		e.hearing.mux.Close()
		e.inbox.unreserve()
	}
}

// planMax bounds the text of a plan, whose sides may come from peers.
const planMax = C.SLUICE_HANDOFF_PLAN_MAX

// planOf reads the sides of both groups.
func planOf(text string) (*layout.Plan, error) {
	if len(text) > planMax {
		return nil, fmt.Errorf("a plan of %d bytes, at most %d: %w", len(text), planMax,
			engine.ErrBounds)
	}
	var sides struct{ Senders, Receivers []layout.Side }
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	err := d.Decode(&sides)
	if _, more := d.Token(); err == nil && more != io.EOF {
		err = errors.New("there is more behind it")
	}
	if err != nil {
		return nil, argument("sluice_handoff_config.plan: %v", err)
	}
	list := func(sides []layout.Side) (list []*layout.Side) {
		for i := range sides {
			list = append(list, &sides[i])
		}
		return list
	}
	return layout.NewPlan(list(sides.Senders), list(sides.Receivers))
}

// groupConfig reads a configuration.
func (e *openEngine) groupConfig(c *C.struct_sluice_handoff_config) (cfg handoff.GroupConfig,
	err error) {
	if c.role != C.SLUICE_HANDOFF_SENDER && c.role != C.SLUICE_HANDOFF_RECEIVER || c.reserved != 0 {
		return cfg, argument("sluice_handoff_config: role %d, reserved %d", c.role, c.reserved)
	}
	cfg.Index = int(c.index)
	if err = byname.SetOptions(&cfg.Limits, stringList(c.options)); err != nil {
		return cfg, err
	}
	listed, err := inPlace[uint64](c.regions, uint64(c.regions_count), "regions")
	if err != nil {
		return cfg, err
	}
	for i, h := range listed {
		if h == 0 {
			cfg.Regions = append(cfg.Regions, nil)
			continue
		}
		r, err := regions.get(h)
		if err == nil && r.of != e {
			err = argument("region %#x belongs to another engine", h)
		}
		if err != nil {
			return cfg, fmt.Errorf("regions[%d]: %w", i, err)
		}
		cfg.Regions = append(cfg.Regions, r.r)
	}
	listed, err = inPlace[uint64](c.peers, uint64(c.peers_count), "peers")
	for i, h := range listed {
		p, err := peers.get(h)
		if err == nil && p.of != e {
			err = argument("peer %#x belongs to another engine", h)
		}
		if err != nil {
			return cfg, fmt.Errorf("peers[%d]: %w", i, err)
		}
		cfg.Peers = append(cfg.Peers, p.p)
	}
	if err == nil {
		cfg.Plan, err = planOf(C.GoString(c.plan))
	}
	return cfg, err
}

//export slgoHandoffOpen
func slgoHandoffOpen(h C.uint64_t, c *C.struct_sluice_handoff_config, out *C.uint64_t,
	f *C.struct_slgo_fault) C.int {
	return calling(&engines, h, 0, f, func(_ context.Context, e *openEngine) error {
		cfg, err := e.groupConfig(c)
		if err != nil {
			return err
		}
		r := &groupRank{of: e, requests: map[*groupRequest]uint64{}}
		mux, err := e.hear()
		if err != nil {
			return err
		}
		sides := cfg.Plan.Receivers()
		if c.role == C.SLUICE_HANDOFF_SENDER {
			sides = cfg.Plan.Senders()
			r.sender, err = handoff.NewGroupSender(mux, cfg)
		} else {
			r.receiver, err = handoff.NewGroupReceiver(mux, cfg)
		}
		if err != nil {
			e.unhear()
			return err
		}
		for _, v := range sides[cfg.Index].Views {
			r.layers = append(r.layers, v.Layer)
		}
		slices.Sort(r.layers)
		r.layers = slices.Compact(r.layers)
		handle, err := adopt(e, &handoffs, r)
		if err != nil {
			return errors.Join(err, r.close())
		}
		r.handle.Store(handle)
		*out = C.uint64_t(handle)
		return nil
	})
}

//export slgoHandoffBegin
func slgoHandoffBegin(h, number C.uint64_t, list *C.struct_sluice_handoff_table, count C.size_t,
	from, to C.uint64_t, out *C.uint64_t, f *C.struct_slgo_fault) C.int {
	return calling(&handoffs, h, 0, f, func(_ context.Context, r *groupRank) error {
		tables, err := tablesOf(list, uint64(count))
		if err != nil {
			return err
		}
		ctx, stop := context.WithCancel(context.Background())
		q := &groupRequest{of: r, stop: stop, ending: newEnding(), told: map[int]bool{},
			queue: make(chan int, len(r.layers))}
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.over {
			stop()
			return engine.ErrClosed
		}
		handle, err := handed.put(q)
		if err != nil {
			stop()
			return err
		}
		r.requests[q] = handle
		*out = C.uint64_t(handle)
		move := r.receive
		if r.sender != nil {
			move = q.send
		}
		go func() {
			q.err = move(ctx, uint64(number), tables,
				layout.Span{From: uint64(from), To: uint64(to)})
			stop()
			q.tell()
		}()
		return nil
	})
}

// tablesOf copies block tables.
func tablesOf(list *C.struct_sluice_handoff_table, count uint64) (tables layout.Tables,
	err error) {
	if count > layout.GroupsMax {
		return nil, argument("%d block tables, at most %d", count, layout.GroupsMax)
	}
	listed, err := inPlace[C.struct_sluice_handoff_table](list, count, "tables")
	for i := range listed {
		blocks, err := inPlace[uint32](listed[i].blocks, uint64(listed[i].count),
			"sluice_handoff_table.blocks")
		if err != nil {
			return nil, err
		}
		tables = append(tables, slices.Clone(blocks))
	}
	return tables, err
}

// send hands a request over as its layers are told, and returns the outcome when nothing is left of
// it.
func (q *groupRequest) send(ctx context.Context, number uint64, t layout.Tables,
	in layout.Span) error {
	p, err := q.of.sender.Begin(ctx, number, t, in)
	if err != nil {
		return err
	}
	for range q.of.layers {
		select {
		case layer := <-q.queue:
			err = p.Layer(ctx, layer)
		case <-p.Ended():
			err = p.Err()
		case <-ctx.Done():
			err = ctx.Err()
		}
		if err != nil {
			break
		}
	}
	if err == nil {
		err = p.Finish(ctx)
	}
	_ = p.Abort(context.Background()) // the rank's limits bound it, and Err says how it ended
	return p.Err()
}

// receive expects a request, and returns as send does.
func (r *groupRank) receive(ctx context.Context, number uint64, t layout.Tables,
	in layout.Span) error {
	q, err := r.receiver.Open(ctx, number, t, in)
	if err != nil {
		return err
	}
	select {
	case <-q.Done():
	case <-ctx.Done():
		_ = q.Cancel(context.Background()) // its limits bound it
	}
	return q.Err()
}

//export slgoHandoffLayer
func slgoHandoffLayer(h C.uint64_t, layer C.uint32_t, f *C.struct_slgo_fault) C.int {
	return calling(&handed, h, 0, f, func(_ context.Context, q *groupRequest) error {
		return q.layer(int(layer))
	})
}

func (q *groupRequest) layer(layer int) error {
	_, has := slices.BinarySearch(q.of.layers, layer)
	q.telling.Lock()
	defer q.telling.Unlock()
	switch {
	case q.of.sender == nil:
		return argument("layers are those of a sender, and this rank receives")
	case !has:
		return fmt.Errorf("layer %d is not on this rank: %w", layer, engine.ErrBounds)
	case q.told[layer]:
		return fmt.Errorf("layer %d was told before: %w", layer, engine.ErrBusy)
	case isClosed(q.done) == 1:
		return q.err // it ends well only with all layers
	}
	q.told[layer] = true
	q.queue <- layer
	return nil
}

//export slgoHandoffFd
func slgoHandoffFd(h C.uint64_t, fd *C.int, f *C.struct_slgo_fault) C.int {
	return calling(&handed, h, 0, f, func(_ context.Context, q *groupRequest) error {
		n, err := q.descriptor()
		*fd = C.int(n)
		return err
	})
}

//export slgoHandoffWait
func slgoHandoffWait(h C.uint64_t, timeout C.int64_t, f *C.struct_slgo_fault) C.int {
	q, err := handed.get(uint64(h))
	switch {
	case err != nil:
		return answer(f, err)
	case !q.within(timeout):
		return C.SLUICE_PENDING
	}
	return answer(f, q.err)
}

//export slgoHandoffAbort
func slgoHandoffAbort(h C.uint64_t, timeout C.int64_t, f *C.struct_slgo_fault) C.int {
	pending := false
	code := calling(&handed, h, timeout, f, func(ctx context.Context, q *groupRequest) error {
		q.stop()
		select {
		case <-q.done:
		case <-ctx.Done():
			if pending = isClosed(q.done) == 0; pending {
				return nil
			}
		}
		free, err := q.free(ctx)
		pending = !free
		return err
	})
	if code == C.SLUICE_OK && pending {
		return C.SLUICE_PENDING
	}
	return code
}

// free reports whether it is proven that the blocks of this rank are free, and waits for that. An
// error: there will be no proof. Precondition: the request has ended.
func (q *groupRequest) free(ctx context.Context) (bool, error) {
	if errors.Is(q.err, handoff.ErrInUse) {
		return false, q.err
	}
	standing, _ := errors.AsType[*handoff.LeasesError](q.err)
	if standing == nil { // without a proof for the other side alone, which has its own
		return true, nil
	}
	for _, l := range standing.Leases {
		select {
		case <-l.Revoked():
		case <-ctx.Done():
			if isClosed(l.Revoked()) == 0 {
				return false, nil
			}
		}
	}
	return true, nil
}

//export slgoHandoffRequestClose
func slgoHandoffRequestClose(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	return calling(&handed, h, 0, f, func(ctx context.Context, q *groupRequest) error {
		if isClosed(q.done) == 0 {
			return fmt.Errorf("the request runs: abort it first: %w", engine.ErrBusy)
		}
		if free, err := q.free(ctx); err == nil && !free {
			return fmt.Errorf("its blocks are not free yet: abort waits for that: %w",
				engine.ErrBusy)
		}
		q.of.forget(q)
		return nil
	})
}

// forget drops the handle of a request that has ended.
func (r *groupRank) forget(q *groupRequest) {
	r.mu.Lock()
	handle := r.requests[q]
	delete(r.requests, q)
	r.mu.Unlock()
	if handed.drop(handle) {
		q.closeWake()
	}
}

//export slgoHandoffStats
func slgoHandoffStats(h C.uint64_t, buffer *C.uint8_t, capacity C.size_t, length *C.size_t,
	f *C.struct_slgo_fault) C.int {
	r, err := handoffs.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	var s handoff.Stats
	if r.sender != nil {
		s = r.sender.Stats()
	} else {
		s = r.receiver.Stats()
	}
	out := handoffJSON{s.Begun, s.Finished, map[string]uint64{}, s.Strays, s.Quarantined}
	for reason, n := range s.Ended {
		out.Ended[reason.String()] = n
	}
	return handJSON(out, buffer, capacity, length, f)
}

// handoffJSON is the JSON of sluice_handoff_stats.
type handoffJSON struct {
	Begun       uint64            `json:"begun"`
	Finished    uint64            `json:"finished"`
	Ended       map[string]uint64 `json:"ended"` // by reason
	Strays      uint64            `json:"strays"`
	Quarantined uint64            `json:"quarantined"`
}

//export slgoHandoffClose
func slgoHandoffClose(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	return calling(&handoffs, h, 0, f, func(_ context.Context, r *groupRank) error {
		return r.close()
	})
}

// close ends the requests of the rank, and makes its handles stale. After an error the program may
// call it again.
func (r *groupRank) close() error {
	r.closing.Lock()
	defer r.closing.Unlock()
	r.mu.Lock()
	r.over = true
	list := make([]*groupRequest, 0, len(r.requests))
	for q := range r.requests {
		list = append(list, q)
	}
	r.mu.Unlock()
	var errs []error
	if !r.ended {
		errs = append(errs, r.closeGroup())
		r.of.unhear()
		r.ended = true
	}
	for _, q := range list {
		<-q.done
		if free, _ := q.free(past); !free {
			errs = append(errs, q.err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, q := range list {
		r.forget(q)
	}
	handoffs.drop(r.handle.Load())
	return nil
}

func (r *groupRank) closeGroup() error {
	if r.sender != nil {
		return r.sender.Close()
	}
	return r.receiver.Close()
}

// closeHandoffs closes the ranks of an engine that closes, whose handles are gone then.
func (e *openEngine) closeHandoffs() error {
	var errs []error
	for _, r := range handoffs.dropAll(func(r *groupRank) bool { return r.of == e }) {
		errs = append(errs, r.close())
	}
	for _, q := range handed.dropAll(func(q *groupRequest) bool { return q.of.of == e }) {
		q.closeWake()
	}
	return errors.Join(errs...)
}

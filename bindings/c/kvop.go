// SPDX-License-Identifier: Apache-2.0

package main

// #include "faces.h"
import "C"

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
)

// namespace is one of a cache.
type namespace struct {
	of    *kv
	name  spaceName
	space kvSpace
	root  *namespace // of sluice_kv_chain: that which it was made of

	opens  int          // that were not closed; guarded by of.mu
	using  sync.RWMutex // own: calls read-lock it, and the last close waits for them
	closed bool         // guarded by using
}

// kvOp is a load, a store or a prefetch.
type kvOp struct {
	of     *kv
	space  *namespace
	cancel context.CancelFunc

	ending   // after which the two that follow are there
	outcomes []cache.Outcome
	err      error
}

// reaching returns the namespace for an operation on a region.
func (n *namespace) reaching(r *engine.Region) (kvSpace, error) {
	own, is := n.space.(ownSpace)
	if !is {
		return n.space, nil
	}
	self, err := n.of.of.Self()
	if err == nil {
		own.peer = self
		own.remote, err = self.Remote(r.Name())
	}
	return own, err
}

//export slgoKVNamespaceOpen
func slgoKVNamespaceOpen(h C.uint64_t, c *C.struct_sluice_kv_namespace_options, timeout C.int64_t,
	out *C.uint64_t, f *C.struct_slgo_fault) C.int {
	return calling(&caches, h, timeout, f, func(ctx context.Context, k *kv) error {
		name := spaceName{name: C.GoString(c.name)}
		for i := range name.geometry {
			name.geometry[i] = byte(c.geometry[i])
		}
		if c.flow > C.SLUICE_KV_MEMORY_ONLY || c.reserved != 0 || c.ttl_ns < 0 {
			return argument("sluice_kv_namespace_options: flow %d, reserved %d, ttl_ns %d", c.flow,
				c.reserved, c.ttl_ns)
		}
		handle, err := k.openNamespace(ctx, name, cache.NamespaceOptions{Geometry: name.geometry,
			Priority: int(c.priority), Flow: cache.Flow(c.flow), TTL: time.Duration(c.ttl_ns),
			Quota:   [2]uint64{uint64(c.memory_quota), uint64(c.disk_quota)},
			HoldMax: uint64(c.hold_max)})
		if err == nil {
			*out = C.uint64_t(handle)
		}
		return err
	})
}

// openNamespace returns the one handle that a namespace has.
func (k *kv) openNamespace(ctx context.Context, name spaceName, o cache.NamespaceOptions) (uint64,
	error) {
	s, err := k.namespace(ctx, name.name, o)
	if err != nil {
		return 0, err
	}
	kept := false
	defer func() {
		if !kept {
			_ = s.Close() // of a server that does not answer it counts until the cache is closed
		}
	}()
	k.mu.Lock()
	defer k.mu.Unlock()
	h, known := k.spaces[name]
	if k.over {
		return 0, engine.ErrClosed
	}
	if known { // by the options that s has set
		n, err := spaces.get(h)
		if err == nil {
			n.opens++
		}
		return h, err
	}
	if h, err = spaces.put(&namespace{of: k, name: name, space: s, opens: 1}); err == nil {
		k.spaces[name], kept = h, true
	}
	return h, err
}

// onSpace is calling for a namespace, which stays open meanwhile.
func onSpace(h C.uint64_t, timeout C.int64_t, f *C.struct_slgo_fault,
	call func(ctx context.Context, n *namespace) error) C.int {
	return calling(&spaces, h, timeout, f, func(ctx context.Context, n *namespace) error {
		n.using.RLock()
		defer n.using.RUnlock()
		if n.closed {
			return &staleError{want: kindKVNamespace, handle: uint64(h)}
		}
		return call(ctx, n)
	})
}

//export slgoKVNamespaceClose
func slgoKVNamespaceClose(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	return calling(&spaces, h, 0, f, func(_ context.Context, n *namespace) error {
		_, own := n.space.(ownSpace)
		if own {
			n.using.Lock()
			defer n.using.Unlock()
		}
		last, err := n.leave(uint64(h))
		if err == nil && last {
			n.closed = own
			if err = n.space.Close(); !own {
				err = nil // the server has it until the cache is closed
			}
		}
		return err
	})
}

// leave ends one open of a namespace. After the last one its handle is stale, and so are those that
// sluice_kv_chain has made of it.
func (n *namespace) leave(h uint64) (last bool, err error) {
	k := n.of
	k.mu.Lock()
	defer k.mu.Unlock()
	if n.opens > 1 {
		n.opens--
		return false, nil
	}
	for op := range k.running {
		if op.space == n || op.space.root == n {
			return false, fmt.Errorf("operations of the namespace run: wait for them: %w",
				engine.ErrBusy)
		}
	}
	if !spaces.drop(h) {
		return false, &staleError{want: kindKVNamespace, handle: h}
	}
	if n.root != nil {
		return false, nil
	}
	delete(k.spaces, n.name)
	spaces.dropAll(func(s *namespace) bool { return s.root == n })
	return true, nil
}

//export slgoKVChain
func slgoKVChain(h C.uint64_t, list *C.struct_sluice_kv_key, count C.size_t, out *C.uint64_t,
	f *C.struct_slgo_fault) C.int {
	return withKeys(h, list, count, 0, f, func(_ context.Context, n *namespace,
		keys []cache.Key) error {
		handle, err := n.chain(uint64(h), keys)
		if err == nil {
			*out = C.uint64_t(handle)
		}
		return err
	})
}

// chain returns a namespace for chains, or for what goes on behind these keys. Where a block is
// depends on that in a cluster alone: of others it is the namespace itself, opened once more.
func (n *namespace) chain(h uint64, before []cache.Key) (uint64, error) {
	k := n.of
	k.mu.Lock()
	defer k.mu.Unlock()
	if _, err := spaces.get(h); err != nil { // it was closed meanwhile
		return 0, err
	}
	s, is := n.space.(clusterSpace)
	if !is {
		n.opens++
		return h, nil
	}
	root := cmp.Or(n.root, n)
	behind := s.chains.Behind(before)
	return spaces.put(&namespace{of: k, name: n.name, root: root, opens: 1,
		space: clusterSpace{Space: behind, chains: behind}})
}

func (k *kv) namespace(ctx context.Context, name string, o cache.NamespaceOptions) (kvSpace,
	error) {
	if k.own != nil {
		n, err := k.own.Namespace(name, o)
		return ownSpace{Namespace: n}, err
	}
	if (o != cache.NamespaceOptions{Geometry: o.Geometry}) {
		return nil, argument("options of a namespace beside its geometry: of a cache that was " +
			"dialled its server says them, of a cluster the directory")
	}
	return k.served.namespace(ctx, spaceName{name, o.Geometry})
}

// withKeys is calling for what keys of a namespace are asked about.
func withKeys(h C.uint64_t, list *C.struct_sluice_kv_key, count C.size_t, timeout C.int64_t,
	f *C.struct_slgo_fault,
	call func(ctx context.Context, n *namespace, keys []cache.Key) error) C.int {
	return onSpace(h, timeout, f, func(ctx context.Context, n *namespace) error {
		if count > C.SLUICE_KV_KEYS_MAX {
			return fmt.Errorf("%d keys, at most %d a call: %w", uint64(count),
				C.SLUICE_KV_KEYS_MAX, engine.ErrBounds)
		}
		keys, err := inPlace[cache.Key](list, uint64(count), "keys")
		if err == nil {
			err = call(ctx, n, keys)
		}
		return err
	})
}

//export slgoKVMatch
func slgoKVMatch(h C.uint64_t, list *C.struct_sluice_kv_key, count C.size_t, timeout C.int64_t,
	found *C.uint8_t, prefix *C.size_t, f *C.struct_slgo_fault) C.int {
	return withKeys(h, list, count, timeout, f, func(ctx context.Context, n *namespace,
		keys []cache.Key) error {
		m, err := n.space.Match(ctx, keys)
		if err != nil {
			return err
		}
		if prefix != nil {
			*prefix = C.size_t(m.Prefix)
		}
		return copyOut(found, m.Blocks)
	})
}

// copyOut writes a byte for each key, where the program wants them.
func copyOut[T ~uint8](to *C.uint8_t, list []T) error {
	if to == nil {
		return nil
	}
	dst, err := inPlace[T](to, uint64(len(list)), "the bytes")
	copy(dst, list)
	return err
}

//export slgoKVRemove
func slgoKVRemove(h C.uint64_t, list *C.struct_sluice_kv_key, count C.size_t, timeout C.int64_t,
	f *C.struct_slgo_fault) C.int {
	return withKeys(h, list, count, timeout, f, func(ctx context.Context, n *namespace,
		keys []cache.Key) error {
		return n.space.Remove(ctx, keys)
	})
}

// kvListedMax bounds the keys of one call. A server answers with at most so many.
const kvListedMax = C.SLUICE_KV_LISTED_MAX

//export slgoKVList
func slgoKVList(h C.uint64_t, at *C.uint32_t, timeout C.int64_t, keys *C.struct_sluice_kv_key,
	count *C.size_t, f *C.struct_slgo_fault) C.int {
	return onSpace(h, timeout, f, func(ctx context.Context, n *namespace) error {
		list, next, err := n.space.Blocks(ctx, uint32(*at))
		if err != nil {
			return err
		}
		dst, err := inPlace[cache.Key](keys, kvListedMax, "keys")
		if err != nil {
			return err
		}
		if len(list) > len(dst) {
			return fmt.Errorf("a server lists %d blocks at a time, at most %d: %w", len(list),
				len(dst), engine.ErrCorrupt)
		}
		for k, b := range list {
			dst[k] = b.Key
		}
		*at, *count = C.uint32_t(next), C.size_t(len(list))
		return nil
	})
}

//export slgoKVHint
func slgoKVHint(h C.uint64_t, kind C.uint32_t, last C.int64_t, list *C.struct_sluice_kv_key,
	count C.size_t, timeout C.int64_t, out *C.struct_sluice_kv_hint_result,
	f *C.struct_slgo_fault) C.int {
	return withKeys(h, list, count, timeout, f, func(ctx context.Context, n *namespace,
		keys []cache.Key) error {
		if kind > C.SLUICE_KV_PREFETCH {
			return argument("hint %d does not exist", kind)
		}
		r, err := n.space.Hint(ctx, keys, cache.Hint{Kind: cache.HintKind(kind),
			For: time.Duration(last)})
		if out != nil {
			*out = C.struct_sluice_kv_hint_result{applied: C.uint64_t(r.Applied),
				missing: C.uint64_t(r.Missing), refused: C.uint64_t(r.Refused)}
		}
		return err
	})
}

//export slgoKVHintEnvelope
func slgoKVHintEnvelope(h C.uint64_t, data *C.uint8_t, size C.size_t, timeout C.int64_t,
	buffer *C.uint8_t, capacity C.size_t, length *C.size_t, f *C.struct_slgo_fault) C.int {
	var outcomes []cache.ActionOutcome
	code := onSpace(h, timeout, f, func(ctx context.Context, n *namespace) error {
		b, err := inPlace[byte](data, uint64(size), "envelope")
		if err == nil {
			outcomes, err = n.space.HintEnvelope(ctx, b)
		}
		return err
	})
	if code != C.SLUICE_OK {
		return code
	}
	return handJSON(outcomes, buffer, capacity, length, f)
}

//export slgoKVEstimate
func slgoKVEstimate(h C.uint64_t, list *C.struct_sluice_kv_key, count C.size_t, timeout C.int64_t,
	out *C.struct_sluice_kv_estimate, f *C.struct_slgo_fault) C.int {
	return withKeys(h, list, count, timeout, f, func(ctx context.Context, n *namespace,
		keys []cache.Key) error {
		e, err := n.space.Estimate(ctx, keys)
		out.memory_blocks, out.disk_blocks = C.uint64_t(e.Blocks[0]), C.uint64_t(e.Blocks[1])
		out.memory_bytes, out.disk_bytes = C.uint64_t(e.Bytes[0]), C.uint64_t(e.Bytes[1])
		out.missing, out.time_ns = C.uint64_t(e.Missing), C.int64_t(e.Time)
		if e.Measured {
			out.measured = 1
		}
		return err
	})
}

//export slgoKVMove
func slgoKVMove(how C.int, h C.uint64_t, list *C.struct_sluice_kv_key, count C.size_t,
	place *C.struct_sluice_kv_place, timeout C.int64_t, out *C.uint64_t,
	f *C.struct_slgo_fault) C.int {
	return withKeys(h, list, count, 0, f, func(_ context.Context, n *namespace,
		keys []cache.Key) error {
		region, err := n.of.region(place.region)
		if err != nil {
			return err
		}
		at, err := placeOf(place, len(keys))
		if err != nil {
			return err
		}
		space, err := n.reaching(region)
		if err != nil {
			return err
		}
		move := space.Load
		switch how {
		case C.SLGO_STORE:
			move = space.Store
		case C.SLGO_REPLACE:
			move = space.Replace
		}
		at.Region, keys = region, slices.Clone(keys) // the caller's are read during the call alone
		return n.start(len(keys), region, timeout, out, func(ctx context.Context) (
			[]cache.Outcome, error) {
			return move(ctx, keys, at)
		})
	})
}

//export slgoKVPrefetch
func slgoKVPrefetch(h C.uint64_t, list *C.struct_sluice_kv_key, count C.size_t,
	timeout C.int64_t, out *C.uint64_t, f *C.struct_slgo_fault) C.int {
	return withKeys(h, list, count, 0, f, func(_ context.Context, n *namespace,
		keys []cache.Key) error {
		keys = slices.Clone(keys)
		return n.start(len(keys), nil, timeout, out, func(ctx context.Context) (
			[]cache.Outcome, error) {
			return n.space.Prefetch(ctx, keys)
		})
	})
}

// placeOf is a place without its region.
func placeOf(p *C.struct_sluice_kv_place, keys int) (at serve.Place, err error) {
	if int(p.loops_count) > len(p.loops) {
		return at, argument("%d loops, at most %d", p.loops_count, len(p.loops))
	}
	slots, err := inPlace[uint32](p.slots, uint64(keys), "sluice_kv_place.slots")
	if err != nil {
		return at, err
	}
	at = serve.Place{Base: uint64(p.base), Stride: uint64(p.stride), Run: uint64(p.run),
		Slots: slices.Clone(slots)}
	for i := range p.loops[:p.loops_count] {
		l := &p.loops[i]
		if l.reserved != 0 {
			return at, argument("sluice_kv_axis.reserved is %d", l.reserved)
		}
		at.Loops = append(at.Loops, cache.Axis{N: uint32(l.n), By: uint64(l.by)})
	}
	return at, nil
}

// start makes an operation of so many keys, on a region unless that is nil.
func (n *namespace) start(keys int, region *engine.Region, timeout C.int64_t, out *C.uint64_t,
	move func(ctx context.Context) ([]cache.Outcome, error)) error {
	k := n.of
	op := &kvOp{of: k, space: n, ending: newEnding()}
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case k.over:
		return engine.ErrClosed
	case region != nil && !k.attached[region]:
		return fmt.Errorf("the region is not attached to the cache: attach it first: %w",
			engine.ErrBounds)
	case len(k.running) >= k.opsMax:
		return fmt.Errorf("%d operations of this cache run: %w", k.opsMax, engine.ErrBusy)
	}
	handle, err := kvOps.put(op)
	if err != nil {
		return err
	}
	*out = C.uint64_t(handle)
	k.running[op] = region
	ctx, stop := within(timeout)
	ctx, op.cancel = context.WithCancel(ctx)
	go func() {
		outcomes, err := move(ctx)
		op.cancel()
		stop()
		k.ended(op, err)
		op.finish(outcomes, err, keys)
	}()
	return nil
}

// ended takes an operation from those that run. Of a cache of this process no revoke proves later
// what the operation could not.
func (k *kv) ended(op *kvOp, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.own != nil && errors.Is(err, engine.ErrUnproven) {
		k.unproven[k.running[op]] = true
	}
	delete(k.running, op)
}

// finish tells those that wait.
func (o *kvOp) finish(outcomes []cache.Outcome, err error, keys int) {
	if len(outcomes) != keys { // it did not begin, or the server has not said
		as := cache.Failed
		if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
			as = cache.Late
		}
		outcomes = slices.Repeat([]cache.Outcome{as}, keys)
	}
	if errors.Is(err, context.Canceled) && !errors.Is(err, engine.ErrUnproven) {
		err = fmt.Errorf("the operation was cancelled: %w", engine.ErrAborted)
	}
	o.outcomes, o.err = outcomes, err
	o.tell()
}

//export slgoKVOpFd
func slgoKVOpFd(h C.uint64_t, fd *C.int, f *C.struct_slgo_fault) C.int {
	return calling(&kvOps, h, 0, f, func(_ context.Context, o *kvOp) error {
		n, err := o.descriptor()
		*fd = C.int(n)
		return err
	})
}

//export slgoKVOpWait
func slgoKVOpWait(h C.uint64_t, timeout C.int64_t, list *C.uint8_t, count C.size_t,
	f *C.struct_slgo_fault) C.int {
	o, err := kvOps.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	if !o.within(timeout) {
		return C.SLUICE_PENDING
	}
	if list != nil && uint64(count) != uint64(len(o.outcomes)) {
		return answer(f, argument("%d outcomes are wanted of an operation of %d keys",
			uint64(count), len(o.outcomes)))
	}
	if err := copyOut(list, o.outcomes); err != nil {
		return answer(f, err)
	}
	return answer(f, o.err)
}

//export slgoKVOpCancel
func slgoKVOpCancel(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	return calling(&kvOps, h, 0, f, func(_ context.Context, o *kvOp) error {
		o.cancel()
		return nil
	})
}

//export slgoKVOpClose
func slgoKVOpClose(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	return calling(&kvOps, h, 0, f, func(_ context.Context, o *kvOp) error {
		if !kvOps.drop(uint64(h)) {
			return &staleError{want: kindKVOp, handle: uint64(h)}
		}
		o.closeWake()
		return nil
	})
}

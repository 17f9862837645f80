// SPDX-License-Identifier: Apache-2.0

package main

// #include "faces.h"
import "C"

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
)

// A cache under a program in C or Python. Handles (handles.go) name three things: a cache, a
// namespace of it, an operation.
//
// What arrives: calls of sluice.h, through calls_kv.c, each with at most SLUICE_KV_KEYS_MAX keys in
// the program's memory. What is asked (match, hint, estimate, remove) reads them in place and
// answers in the call. What moves blocks (load, store, prefetch) copies the lists and returns.
//
// What leaves: an outcome a key. An operation has a goroutine, in which the cache, or the server of
// another process, moves the blocks; its end is told by a channel, for slgoKVOpWait, and by an
// eventfd where the program has asked for one. The program polls that, or waits.
//
// The order of an operation: slgoKVMove reads the place; kv.start has it among those that run, if
// the region is attached and fewer than opsMax run; its goroutine moves, takes it from them and
// tells those that wait. A detach refuses further ones on the region at once. Of a cache of this
// process it waits for those that run; of others it revokes the leases, whatever the servers do.
//
// What ends: a cache ends its operations, by cache.Close or by the end of the connection, then its
// handles are stale; an engine closes its caches first.
//
//	kv.go       options, open, dial, serve, close, regions
//	kvop.go     namespaces, what is asked, operations
//	kvspace.go  namespaces of this process and of a cluster, as serve.Space is one of another
//	kvserved.go caches of other processes: of one, and of the nodes of a cluster
//	kvtoken.go  one answer for several ranks

// kv is a cache that the program uses: of this process, or of others that it has dialled.
type kv struct {
	of     *openEngine
	own    *cache.Cache // nil: dialled
	served served       // nil: own
	handle atomic.Uint64
	opsMax int

	closing sync.Mutex // one close at a time

	mu       sync.Mutex // guards what follows
	over     bool
	reserved bool                     // the engine's messages are the cache's
	stop     func()                   // ends the server; nil: there is none
	spaces   map[spaceName]uint64     // handles of namespaces
	attached map[*engine.Region]bool  // regions that operations may name
	running  map[*kvOp]*engine.Region // operations, and the region of each; nil: of a prefetch
	unproven map[*engine.Region]bool  // own: of operations that have ended without a proof
}

// spaceName is what a namespace is known by.
type spaceName struct {
	name     string
	geometry [32]byte
}

// kvOpsMax is how many operations run at a time, by default and of a cache that was dialled.
const kvOpsMax = 1024

// How long a server may take for what has no timeout of its own.
const (
	kvStatsLimit = 5 * time.Second
	kvCloseLimit = 15 * time.Second
)

// kvOptions are the options of sluice_kv_open, but for those of disks.
type kvOptions struct {
	cache.MemoryConfig
	Policy string
	cache.Config
}

// kvConfig reads the options of sluice_kv_open.
func kvConfig(words []string) (cfg cache.Config, err error) {
	var o kvOptions
	var own []string
	for _, w := range words {
		path, isDisk := strings.CutPrefix(w, "disk=")
		option, ofDisk := strings.CutPrefix(w, "disk_")
		switch {
		case isDisk:
			o.Disks = append(o.Disks, cache.DiskConfig{Path: path})
		case !ofDisk:
			own = append(own, w)
		case o.Disks == nil:
			return cfg, argument("option %q: disk=PATH goes before it", w)
		default:
			d := &o.Disks[len(o.Disks)-1]
			if err = byname.SetOptions(d, []string{option}); err != nil {
				return cfg, fmt.Errorf("disk %s: %w", d.Path, err)
			}
		}
	}
	if err = byname.SetOptions(&o, own); err != nil {
		return cfg, err
	}
	cfg = o.Config
	cfg.Memory, cfg.Policy = o.MemoryConfig, cache.Policy(o.Policy)
	cfg.OpsMax = cmp.Or(cfg.OpsMax, kvOpsMax)
	return cfg, nil
}

// calling looks a handle up, and answers with what a call returns that takes a timeout.
func calling[T any](t *table[T], h C.uint64_t, timeout C.int64_t, f *C.struct_slgo_fault,
	call func(ctx context.Context, v *T) error) C.int {
	v, err := t.get(uint64(h))
	if err == nil {
		ctx, cancel := within(timeout)
		defer cancel()
		err = call(ctx, v)
	}
	return answer(f, err)
}

//export slgoKVOpen
func slgoKVOpen(h C.uint64_t, options **C.char, timeout C.int64_t, out *C.uint64_t,
	f *C.struct_slgo_fault) C.int {
	return calling(&engines, h, timeout, f, func(ctx context.Context, e *openEngine) error {
		cfg, err := kvConfig(stringList(options))
		if err != nil {
			return err
		}
		cfg.Engine = e.Engine
		c, err := cache.Open(ctx, cfg)
		if err != nil {
			return err
		}
		return e.adoptKV(&kv{of: e, own: c, opsMax: cfg.OpsMax}, out)
	})
}

//export slgoKVDial
func slgoKVDial(h C.uint64_t, network, address *C.char, timeout C.int64_t, out *C.uint64_t,
	f *C.struct_slgo_fault) C.int {
	return calling(&engines, h, timeout, f, func(ctx context.Context, e *openEngine) error {
		if err := e.inbox.reserve(); err != nil {
			return err
		}
		s, err := e.dialKV(ctx, C.GoString(network), C.GoString(address))
		if err != nil {
			e.inbox.unreserve()
			return err
		}
		return e.adoptKV(&kv{of: e, served: s, opsMax: kvOpsMax, reserved: true}, out)
	})
}

// adoptKV gives a cache its handle, or closes it.
func (e *openEngine) adoptKV(k *kv, out *C.uint64_t) error {
	k.spaces, k.attached = map[spaceName]uint64{}, map[*engine.Region]bool{}
	k.running, k.unproven = map[*kvOp]*engine.Region{}, map[*engine.Region]bool{}
	handle, err := adopt(e, &caches, k)
	if err != nil {
		return errors.Join(err, k.close())
	}
	k.handle.Store(handle)
	*out = C.uint64_t(handle)
	return nil
}

//export slgoKVServe
func slgoKVServe(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	return calling(&caches, h, 0, f, func(_ context.Context, k *kv) error {
		if k.own == nil {
			return fmt.Errorf("serve a cache that was dialled: %w", engine.ErrNotSupported)
		}
		k.mu.Lock()
		defer k.mu.Unlock()
		switch {
		case k.over:
			return engine.ErrClosed
		case k.reserved: // it serves already
			return nil
		}
		s, err := serve.New(serve.Config{Cache: k.own, Engine: k.of.Engine})
		if err == nil {
			err = k.of.inbox.reserve()
		}
		if err != nil {
			return err
		}
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan struct{})
		k.reserved, k.stop = true, func() { cancel(); <-ended }
		go func() {
			defer close(ended)
			_ = s.Run(ctx) // it ends by stop, or with the engine
		}()
		return nil
	})
}

//export slgoKVClose
func slgoKVClose(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	return calling(&caches, h, 0, f, func(_ context.Context, k *kv) error { return k.close() })
}

// close ends the cache, and makes stale what is of it. After an error it may be called again.
func (k *kv) close() error {
	k.closing.Lock()
	defer k.closing.Unlock()
	k.mu.Lock()
	first, stop := !k.over, k.stop
	k.over = true
	k.mu.Unlock()
	if first && stop != nil {
		stop()
	}
	err := k.closeStore()
	if first && k.reserved {
		k.of.inbox.unreserve()
	}
	if err != nil {
		return err
	}
	for _, o := range kvOps.dropAll(func(o *kvOp) bool { return o.of == k }) {
		o.closeWake()
	}
	spaces.dropAll(func(s *namespace) bool { return s.of == k })
	tokens.dropAll(func(t *kvToken) bool { return t.of == k })
	caches.drop(k.handle.Load())
	return nil
}

func (k *kv) closeStore() error {
	if k.own != nil {
		return k.own.Close()
	}
	ctx, cancel := context.WithTimeout(context.Background(), kvCloseLimit)
	defer cancel()
	return k.served.Close(ctx)
}

// closeCaches closes those of an engine that closes, whose handles are gone then.
func (e *openEngine) closeCaches() error {
	var errs []error
	for _, k := range caches.dropAll(func(k *kv) bool { return k.of == e }) {
		errs = append(errs, k.close())
	}
	return errors.Join(errs...)
}

//export slgoKVStats
func slgoKVStats(h C.uint64_t, buffer *C.uint8_t, capacity C.size_t, length *C.size_t,
	f *C.struct_slgo_fault) C.int {
	var stats any
	code := calling(&caches, h, C.int64_t(kvStatsLimit), f, func(ctx context.Context,
		k *kv) (err error) {
		if k.served != nil {
			stats, err = k.served.stats(ctx)
			return err
		}
		a := k.own.Attached()
		stats = struct { // a part of serve.Report
			cache.Stats
			Attached serve.Attached `json:"attached"`
		}{k.own.Stats(), serve.Attached{Blocks: a.Blocks, Bytes: a.Bytes,
			Ms: float64(a.Took) / 1e6, Fresh: a.Fresh}}
		return nil
	})
	if code != C.SLUICE_OK {
		return code
	}
	return handJSON(stats, buffer, capacity, length, f)
}

//export slgoKVDrain
func slgoKVDrain(h C.uint64_t, timeout C.int64_t, f *C.struct_slgo_fault) C.int {
	return calling(&caches, h, timeout, f, func(ctx context.Context, k *kv) error {
		if k.served != nil {
			return k.served.Drain(ctx)
		}
		return k.own.Drain(ctx)
	})
}

//export slgoKVAttach
func slgoKVAttach(h, region C.uint64_t, timeout C.int64_t, f *C.struct_slgo_fault) C.int {
	return calling(&caches, h, timeout, f, func(ctx context.Context, k *kv) error {
		r, err := k.region(region)
		if err == nil && k.served != nil {
			err = k.served.Attach(ctx, r)
		}
		if err == nil {
			k.mu.Lock()
			defer k.mu.Unlock()
			k.attached[r] = true
		}
		return err
	})
}

//export slgoKVDetach
func slgoKVDetach(h, region C.uint64_t, timeout C.int64_t, f *C.struct_slgo_fault) C.int {
	return calling(&caches, h, timeout, f, func(ctx context.Context, k *kv) error {
		r, err := k.region(region)
		if err == nil {
			err = k.detach(ctx, r)
		}
		return err
	})
}

func (k *kv) detach(ctx context.Context, r *engine.Region) error {
	k.mu.Lock()
	delete(k.attached, r)
	var running []*kvOp
	for op, of := range k.running {
		if of == r {
			running = append(running, op)
		}
	}
	k.mu.Unlock()
	if k.served != nil {
		return k.served.Detach(ctx, r)
	}
	for _, op := range running {
		select {
		case <-op.done:
		case <-ctx.Done():
			return fmt.Errorf("detach: %d operations on the region ran: %w", len(running),
				ctx.Err())
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.unproven[r] {
		return fmt.Errorf("detach: transfers of the region were given up: keep its memory as "+
			"long as the process runs: %w", engine.ErrUnproven)
	}
	return nil
}

// region is one of the cache's engine.
func (k *kv) region(h C.uint64_t) (*engine.Region, error) {
	r, err := regions.get(uint64(h))
	switch {
	case err != nil:
		return nil, err
	case r.of != k.of:
		return nil, argument("region %#x belongs to another engine than the cache", uint64(h))
	}
	return r.r, nil
}

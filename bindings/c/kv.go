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

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
)

// The way of an operation on a cache: slgoKVMove (kvop.go) copies the lists of the call and starts
// a goroutine, in which the cache, or the server of another process, moves the blocks. Its end is
// told by a channel, for slgoKVOpWait, and by an eventfd where the program has asked for one.
// Whether the cache is of this process is known to kvstore.go alone.

// kv is a cache that the program uses.
type kv struct {
	of      *openEngine
	handle  atomic.Uint64
	store   kvStore
	opsMax  int64
	running atomic.Int64 // operations

	closing sync.Mutex // one close at a time

	mu       sync.Mutex // guards what follows
	over     bool
	reserved bool                 // the engine's messages are the cache's
	stop     func()               // ends the server; nil: there is none
	spaces   map[spaceName]uint64 // handles of namespaces
}

// spaceName is what a namespace is known by.
type spaceName struct {
	name     string
	geometry [32]byte
}

// kvOpsMax is how many operations run at a time, by default and of a cache that was dialled.
const kvOpsMax = 1024

// kvOptions are the options of sluice_kv_open, but for those of disks.
type kvOptions struct {
	Path                  string
	Bytes, Extent, Blocks uint64
	Policy                string
	VerifyFirst           bool
	CompareKnown          bool
	OpsMax                int
}

// kvDisk are those of one disk.
type kvDisk struct {
	Disk                                              string
	DiskBytes, DiskExtent, DiskBlocks, DiskDailyBytes uint64
	DiskDurable                                       bool
}

// kvConfig reads the options of sluice_kv_open.
func kvConfig(words []string) (cfg cache.Config, err error) {
	var o kvOptions
	var own []string
	var disks [][]string
	for _, w := range words {
		switch {
		case strings.HasPrefix(w, "disk="):
			disks = append(disks, []string{w})
		case !strings.HasPrefix(w, "disk_"):
			own = append(own, w)
		case disks == nil:
			return cfg, argument("option %q: disk=PATH goes before it", w)
		default:
			disks[len(disks)-1] = append(disks[len(disks)-1], w)
		}
	}
	if err = byname.SetOptions(&o, own); err != nil {
		return cfg, err
	}
	cfg = cache.Config{Memory: cache.MemoryConfig{Path: o.Path, Bytes: o.Bytes, Extent: o.Extent},
		Blocks: o.Blocks, Policy: cache.Policy(o.Policy), VerifyFirst: o.VerifyFirst,
		CompareKnown: o.CompareKnown, OpsMax: cmp.Or(o.OpsMax, kvOpsMax)}
	for _, words := range disks {
		var d kvDisk
		if err = byname.SetOptions(&d, words); err != nil {
			return cfg, err
		}
		cfg.Disks = append(cfg.Disks, cache.DiskConfig{Path: d.Disk, Bytes: d.DiskBytes,
			Extent: d.DiskExtent, Blocks: d.DiskBlocks, BytesADay: d.DiskDailyBytes,
			Durable: d.DiskDurable})
	}
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
		return e.adoptKV(&kv{of: e, store: newOwnCache(e.Engine, c), opsMax: int64(cfg.OpsMax)},
			out)
	})
}

//export slgoKVDial
func slgoKVDial(h C.uint64_t, network, address *C.char, timeout C.int64_t, out *C.uint64_t,
	f *C.struct_slgo_fault) C.int {
	return calling(&engines, h, timeout, f, func(ctx context.Context, e *openEngine) error {
		if err := checkNetwork(C.GoString(network)); err != nil {
			return err
		}
		if err := e.inbox.reserve(); err != nil {
			return err
		}
		c, err := serve.Dial(ctx, e.Engine, C.GoString(network), C.GoString(address))
		if err != nil {
			e.inbox.unreserve()
			return err
		}
		return e.adoptKV(&kv{of: e, store: dialledCache{c}, opsMax: kvOpsMax, reserved: true}, out)
	})
}

// adoptKV gives a cache its handle, or closes it.
func (e *openEngine) adoptKV(k *kv, out *C.uint64_t) error {
	k.spaces = map[spaceName]uint64{}
	handle, err := adopt(e, &caches, k)
	if err != nil {
		err = errors.Join(err, k.store.close())
		if k.reserved {
			e.inbox.unreserve()
		}
		return err
	}
	k.handle.Store(handle)
	*out = C.uint64_t(handle)
	return nil
}

//export slgoKVServe
func slgoKVServe(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	return calling(&caches, h, 0, f, func(_ context.Context, k *kv) error {
		own, is := k.store.(*ownCache)
		if !is {
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
		s, err := serve.New(serve.Config{Cache: own.Cache, Engine: k.of.Engine})
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
	for _, p := range kvPins.dropAll(func(p *kvPin) bool { return p.of == k }) {
		_ = p.end() // the cache waits for it; what was read in a cache that closes is of no use
	}
	err := k.store.close()
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
	caches.drop(k.handle.Load())
	return nil
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
	k, err := caches.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	s, err := k.store.stats()
	if err != nil {
		return answer(f, err)
	}
	return handJSON(s, buffer, capacity, length, f)
}

//export slgoKVDrain
func slgoKVDrain(h C.uint64_t, timeout C.int64_t, f *C.struct_slgo_fault) C.int {
	return calling(&caches, h, timeout, f, func(ctx context.Context, k *kv) error {
		return k.store.Drain(ctx)
	})
}

//export slgoKVAttach
func slgoKVAttach(h, region C.uint64_t, timeout C.int64_t, f *C.struct_slgo_fault) C.int {
	return calling(&caches, h, timeout, f, func(ctx context.Context, k *kv) error {
		r, err := k.region(region)
		if err == nil {
			err = k.store.Attach(ctx, r)
		}
		return err
	})
}

//export slgoKVDetach
func slgoKVDetach(h, region C.uint64_t, timeout C.int64_t, f *C.struct_slgo_fault) C.int {
	return calling(&caches, h, timeout, f, func(ctx context.Context, k *kv) error {
		r, err := k.region(region)
		if err == nil {
			err = k.store.Detach(ctx, r)
		}
		return err
	})
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

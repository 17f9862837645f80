// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
)

// cacheEnd is a cache of package kv/cache. A read is a Load, a write a Store of blocks that it does
// not have. On lanes cache-shm and cache-tcp the target serves the cache by package serve, and the
// initiator is its client, or one process is both. On lane cache-disk one process has a cache with
// little memory before a disk: a Load finds nothing in memory, and a Store is done when the disk
// has the blocks.
//
// In slot s of the other side lies the block of key s, in slot s of this memory what is loaded or
// stored.
type cacheEnd struct {
	base
	route
	way    string // each, first or own
	folder string // of lane cache-disk

	memory *engine.Memory
	closes []func() // from the last on

	// what a process that serves a model does with a cache, its own or another's
	match  func(context.Context, []cache.Key) (cache.Match, error)
	remove func(context.Context, []cache.Key) error
	move   func(ctx context.Context, p *cachePosting, op string) ([]cache.Outcome, error)

	// of all Stores that were posted: how long the call took, and the copy behind it
	called, copied time.Duration
}

// newCache takes how a cache is used and backends: each and first are of another process, which
// verifies a block by each load or the first one; own and dir=DIR, of lane cache-disk, of this one.
func newCache(args []string) (end, error) {
	if len(args) < 2 {
		return nil, errors.New("want each, first, own or dir=DIR, and a backend")
	}
	e := &cacheEnd{way: args[0]}
	if folder, ok := strings.CutPrefix(e.way, "dir="); ok {
		e.way, e.folder = "own", folder
	}
	return e, e.route.open("cache", args[1:])
}

// The sizes of a cache beside its blocks: an extent holds the longest block that is measured by
// default, and blocks that were stored once may have half of the room.
const (
	cacheExtent = 16 << 20
	diskMemory  = 4 * cacheExtent // before a disk
)

// Open implements bench.End.
func (e *cacheEnd) Open(r *bench.Request) (a bench.Answer, err error) {
	lane := bench.Lane(r.Lane)
	switch {
	case r.Threads > 1:
		return a, fmt.Errorf("it posts one operation at a time: %w", bench.ErrUnsupported)
	case (lane == bench.CacheDisk) != (e.folder != ""):
		return a, fmt.Errorf("it is not for lane %s: %w", lane, bench.ErrUnsupported)
	}
	if err := onlyLane(r, bench.CacheLanes...); err != nil {
		return a, err
	}
	a.Version, a.Settings = "sluice", map[string]string{
		"each":  "kv/cache/serve, from another process, verified by each load",
		"first": "kv/cache/serve, from another process, verified by the first load",
		"own":   "kv/cache, in this process, verified by each load"}[e.way]
	if r.Role == bench.RoleTarget {
		c, err := e.openCache(r.Bytes)
		if err == nil {
			a.Card, err = e.serve(c, lane)
		}
		return a, err
	}
	if e.memory, err = e.eng.Alloc(r.Bytes, engine.AllocOptions{Populate: true}); err != nil {
		return a, err
	}
	e.region, err = e.eng.Register(nearName, e.memory.Segment())
	if err == nil && e.way == "own" {
		err = e.useOwn(r.FarBytes)
	}
	return a, err
}

// useOwn has this process open a cache and use it. A Store to a disk is done when that has the
// blocks.
func (e *cacheEnd) useOwn(bytes uint64) error {
	c, err := e.openCache(bytes)
	if err != nil {
		return err
	}
	space, err := c.Namespace("bench", cache.NamespaceOptions{})
	if err != nil {
		return err
	}
	self, err := e.eng.Self()
	if err != nil {
		return err
	}
	remote, err := self.Remote(nearName)
	e.match = func(_ context.Context, keys []cache.Key) (cache.Match, error) {
		return space.Match(keys), nil
	}
	e.remove = func(_ context.Context, keys []cache.Key) error { return space.Remove(keys) }
	e.move = func(ctx context.Context, p *cachePosting, op string) ([]cache.Outcome, error) {
		at := cache.Place{Peer: self, Remote: remote, Stride: p.size, Slots: p.slots, Run: p.size}
		if op == bench.OpRead {
			load := space.Load(ctx, p.keys, at)
			err := load.Wait(ctx)
			return load.Outcomes(), err
		}
		begin := time.Now()
		store := space.Store(ctx, p.keys, at)
		e.called += time.Since(begin)
		err := store.Wait(ctx)
		e.copied += time.Since(begin)
		if err == nil && e.folder != "" {
			<-store.Durable()
			for i, where := range space.Match(p.keys).Blocks {
				if where&cache.OnDisk == 0 {
					err = fmt.Errorf("block %d did not come to the disk", i)
				}
			}
		}
		return store.Outcomes(), err
	}
	return err
}

// openCache opens a cache with room for the blocks of an operation's other side twice. Its files
// lose their names at once.
func (e *cacheEnd) openCache(bytes uint64) (*cache.Cache, error) {
	room, name := 2*bytes+4*cacheExtent, fmt.Sprint("sluice-bench-", os.Getpid())
	cfg := cache.Config{Engine: e.eng, VerifyFirst: e.way == "first", Blocks: room / 4096,
		Memory: cache.MemoryConfig{Bytes: room, Extent: cacheExtent, Path: "/dev/shm/" + name}}
	if e.folder != "" {
		cfg.Memory.Bytes, cfg.Policy = diskMemory, cache.LRU
		cfg.Disks = []cache.DiskConfig{{Bytes: room, Extent: cacheExtent, Blocks: room / 4096,
			Path: filepath.Join(e.folder, name)}}
		defer os.Remove(cfg.Disks[0].Path)
	}
	defer os.Remove(cfg.Memory.Path)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := cache.Open(ctx, cfg)
	if err == nil {
		e.closes = append(e.closes, func() { _ = c.Close() })
	}
	return c, err
}

// serve has the target serve the cache, and returns where.
func (e *cacheEnd) serve(c *cache.Cache, lane bench.Lane) (card string, err error) {
	network, address := "tcp", "127.0.0.1:0"
	if lane == bench.CacheShm {
		network, address = "unix", fmt.Sprintf("@sluice-bench-%d", os.Getpid())
	}
	l, err := net.Listen(network, address)
	if err != nil {
		return "", err
	}
	s, err := serve.New(serve.Config{Cache: c, Engine: e.eng})
	if err != nil {
		return "", errors.Join(err, l.Close())
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 2)
	go func() { ended <- e.eng.Serve(ctx, l) }()
	go func() { ended <- s.Run(ctx) }()
	e.closes = append(e.closes, func() {
		cancel()
		<-ended
		<-ended
	})
	return network + " " + l.Addr().String(), nil
}

// Memory implements bench.End.
func (e *cacheEnd) Memory() []byte {
	if e.memory == nil { // a target
		return nil
	}
	return e.memory.Bytes()
}

// Connect implements bench.End. The server learns of its client by what that sends.
func (e *cacheEnd) Connect(card string) error {
	if card == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var network, address string
	if _, err := fmt.Sscan(card, &network, &address); err != nil {
		return fmt.Errorf("read the card: %w", err)
	}
	c, err := serve.Dial(ctx, e.eng, network, address)
	if err != nil {
		return err
	}
	e.closes = append(e.closes, func() { _ = c.Close(context.Background()) })
	if err := c.Attach(ctx, e.region); err != nil {
		return err
	}
	space, err := c.Namespace(ctx, "bench", [32]byte{})
	if err != nil {
		return err
	}
	e.match, e.remove = space.Match, space.Remove
	e.move = func(ctx context.Context, p *cachePosting, op string) ([]cache.Outcome, error) {
		place := serve.Place{Region: e.region, Stride: p.size, Slots: p.slots, Run: p.size}
		if op == bench.OpRead {
			return space.Load(ctx, p.keys, place)
		}
		return space.Store(ctx, p.keys, place)
	}
	return nil
}

// Keyed implements bench.Keyed.
func (e *cacheEnd) Keyed() {}

// Remark implements bench.Remarker.
func (e *cacheEnd) Remark() string {
	if e.copied == 0 || e.folder != "" {
		return ""
	}
	share := 100 * e.called.Seconds() / e.copied.Seconds()
	e.called, e.copied = 0, 0
	return fmt.Sprintf("a Store holds up its caller for %.2f %% of the copy's time", share)
}

// keysOf returns the keys of slots.
func keysOf(slots []int32) []cache.Key {
	keys := make([]cache.Key, len(slots))
	for i, s := range slots {
		binary.LittleEndian.PutUint32(keys[i][:], uint32(s))
		keys[i] = cache.KeyOf(keys[i][:])
	}
	return keys
}

// cachePosting is an operation on the blocks of some keys.
type cachePosting struct {
	*cacheEnd
	op    string
	size  uint64
	keys  []cache.Key
	slots []uint32
}

// Prepare implements bench.End.
func (e *cacheEnd) Prepare(op string, size uint64, local, remote []int32) (bench.Posting, error) {
	if op == bench.OpDurable {
		return nil, errDurable
	}
	if op == bench.OpMatch { // one short block will do for all
		local = make([]int32, len(remote))
	}
	p := &cachePosting{e, op, size, keysOf(remote), unsigned(local)}
	if err := e.remove(context.Background(), p.keys); err != nil {
		return nil, err
	}
	return p, proven(op, pieces(e.Memory(), local, size), p.keys, p.post)
}

// pieces are the bytes in slots.
func pieces(memory []byte, slots []int32, size uint64) (list [][]byte) {
	for _, s := range slots {
		list = append(list, slice(memory, s, size))
	}
	return list
}

// proven writes values, clears their memory, and compares what is read.
func proven(op string, values [][]byte, keys []cache.Key, post func(op string) error) error {
	for i, v := range values {
		fill(v, keys[i])
	}
	if err := post(bench.OpWrite); err != nil || op == bench.OpMatch {
		return err
	}
	for _, v := range values {
		clear(v)
	}
	err := post(bench.OpRead)
	want := bytes.Clone(values[0])
	for i, v := range values {
		if fill(want, keys[i]); err == nil && !bytes.Equal(want, v) {
			err = fmt.Errorf("value %d is not what was stored: %w", i, bench.ErrNonsense)
		}
	}
	return err
}

// fill writes the content of the block of a key.
func fill(b []byte, k cache.Key) {
	for n := copy(b, k[:]); n < len(b); {
		n += copy(b[n:], b[:n])
	}
}

// Reset implements bench.Resetter: a Store finds none of its blocks, and a Load from a disk none in
// memory.
func (p *cachePosting) Reset(ctx context.Context) (err error) {
	switch {
	case p.op == bench.OpWrite:
		err = p.remove(ctx, p.keys)
	case p.op == bench.OpRead && p.folder != "":
		var m cache.Match
		m, err = p.match(ctx, p.keys)
		there := func(f cache.Found) bool { return f&cache.InMemory != 0 }
		if slices.ContainsFunc(m.Blocks, there) {
			err = fmt.Errorf("blocks lie in memory before they are loaded: use --pages and a "+
				"larger --spread: %w", bench.ErrUnsupported)
		}
	}
	return err
}

// Post implements bench.Posting.
func (p *cachePosting) Post(context.Context) error { return p.post(p.op) }

func (p *cachePosting) post(op string) error {
	ctx := context.Background()
	if op == bench.OpMatch {
		m, err := p.match(ctx, p.keys)
		if err == nil && m.Prefix != len(p.keys) {
			err = fmt.Errorf("%d of %d keys match: %w", m.Prefix, len(p.keys), bench.ErrNonsense)
		}
		return err
	}
	outcomes, err := p.move(ctx, p, op)
	for i, o := range outcomes {
		if err == nil && o != cache.Done {
			err = fmt.Errorf("block %d is %v", i, o)
		}
	}
	return err
}

// Close implements bench.Posting.
func (p *cachePosting) Close() error { return p.remove(context.Background(), p.keys) }

func (e *cacheEnd) close() {
	for _, f := range slices.Backward(e.closes) {
		f()
	}
	e.eng.Close()
	if e.memory != nil {
		e.memory.Close()
	}
}

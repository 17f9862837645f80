// SPDX-License-Identifier: Apache-2.0

package object

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
)

// fake is a bucket in a map.
type fake struct {
	mu       sync.Mutex
	objects  map[string][]byte
	at       map[string]time.Time
	gets     int
	requests int
	aborted  int
	most     int          // bytes of packs that there were at a time
	failing  func() error // of each request; nil: it works
	hangs    bool         // Get answers no more
	during   func()       // of the next Get, or Put of a pack; nil: nothing

	noUploads error // of AbortUploads
	noDelete  error
}

func newFake() *fake { return &fake{objects: map[string][]byte{}, at: map[string]time.Time{}} }

func (f *fake) begin() (unlock func(), err error) {
	f.mu.Lock()
	f.requests++
	if f.failing != nil {
		err = f.failing()
	}
	return f.mu.Unlock, err
}

// meanwhile calls what a test has put into during, and forgets it.
func (f *fake) meanwhile() {
	var during func()
	f.set(func(f *fake) { during, f.during = f.during, nil })
	if during != nil {
		during()
	}
}

func (f *fake) Put(_ context.Context, name string, p []byte) error {
	if strings.HasSuffix(name, packSuffix) {
		f.meanwhile()
	}
	unlock, err := f.begin()
	defer unlock()
	if err != nil {
		return err
	}
	f.objects[name], f.at[name] = slices.Clone(p), time.Now()
	all := 0
	for name, p := range f.objects {
		if strings.HasSuffix(name, packSuffix) {
			all += len(p)
		}
	}
	f.most = max(f.most, all)
	return nil
}

func (f *fake) Get(ctx context.Context, name, _ string, offset int64, into [][]byte) error {
	f.meanwhile()
	unlock, err := f.begin()
	hangs := f.hangs
	p, ok := f.objects[name]
	f.gets++
	unlock()
	switch {
	case err != nil:
		return err
	case hangs:
		<-ctx.Done()
		return ctx.Err()
	case !ok:
		return fs.ErrNotExist
	}
	for _, to := range into {
		if offset+int64(len(to)) > int64(len(p)) {
			return errors.New("beyond the end")
		}
		copy(to, p[offset:])
		offset += int64(len(to))
	}
	return nil
}

func (f *fake) List(_ context.Context, prefix string, visit func(Info) error) error {
	unlock, err := f.begin()
	objects, at := maps.Clone(f.objects), maps.Clone(f.at)
	unlock()
	for _, name := range slices.Sorted(maps.Keys(objects)) {
		if strings.HasPrefix(name, prefix) && err == nil {
			err = visit(Info{Name: name, Size: int64(len(objects[name])), At: at[name]})
		}
	}
	return err
}

func (f *fake) Delete(_ context.Context, name string) error {
	unlock, err := f.begin()
	defer unlock()
	if err = errors.Join(err, f.noDelete); err == nil {
		delete(f.objects, name)
	}
	return err
}

func (f *fake) AbortUploads(context.Context, string, time.Time) error {
	unlock, err := f.begin()
	defer unlock()
	f.aborted++
	return errors.Join(err, f.noUploads)
}

func (f *fake) set(change func(f *fake)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(f)
}

func (f *fake) names(suffix string) (list []string) {
	f.set(func(f *fake) {
		for _, name := range slices.Sorted(maps.Keys(f.objects)) {
			if strings.HasSuffix(name, suffix) {
				list = append(list, name)
			}
		}
	})
	return list
}

var space = [16]byte{1}

func keyOf(n int) (key cache.Key) {
	binary.BigEndian.PutUint64(key[:], uint64(n))
	return key
}

func keysOf(from, n int) (keys []cache.Key) {
	for k := range n {
		keys = append(keys, keyOf(from+k))
	}
	return keys
}

// contentOf returns the bytes of block n. Another version of it has other bytes.
func contentOf(n, size, version int) []byte {
	r := rand.NewChaCha8([32]byte{byte(n), byte(n >> 8), byte(version)})
	p := make([]byte, size)
	_, _ = r.Read(p)
	return p
}

func openTier(t *testing.T, b Bucket, change func(*Config)) *Tier {
	t.Helper()
	cfg := Config{Bucket: b, Prefix: "node/", Bytes: 64 << 20, PackBytes: 64 << 10,
		Timeout: time.Minute, rest: time.Millisecond, linger: time.Millisecond,
		tombAge: time.Nanosecond}
	if change != nil {
		change(&cfg)
	}
	tier, err := Open(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { _ = tier.Close(context.Background()) })
	return tier
}

func await(t *testing.T, is func() bool) {
	t.Helper()
	for limit := time.Now().Add(2 * time.Minute); !is(); runtime.Gosched() {
		require.True(t, time.Now().Before(limit), "it has not come")
	}
}

func (t *Tier) isReady() bool { return t.Stats().Unused == "" }

func (t *Tier) has(keys []cache.Key) (n int) {
	for _, b := range t.Find(space, keys) {
		if b.Size > 0 {
			n++
		}
	}
	return n
}

func put(t *testing.T, tier *Tier, n, size, version int) bool {
	t.Helper()
	if !tier.Wants(space, keyOf(n), uint32(size), true) {
		return false
	}
	p := contentOf(n, size, version)
	require.NoError(t, tier.Write(t.Context(), space, keyOf(n), cache.BelowBlock{
		Size: uint32(size), CRC: crc32.Checksum(p, castagnoli), Used: 7}, p))
	return true
}

// read reads blocks of one size, and checks the bytes of those that are there.
func read(t *testing.T, tier *Tier, keys []cache.Key, size int) (there []bool) {
	t.Helper()
	into := make([][]byte, len(keys))
	for k := range into {
		into[k] = make([]byte, size)
	}
	there = tier.Read(t.Context(), space, keys, into)
	for k, ok := range there {
		if ok {
			n := int(binary.BigEndian.Uint64(keys[k][:]))
			require.True(t, bytes.Equal(contentOf(n, size, 0), into[k]), "block %d", n)
		}
	}
	return there
}

func count(list []bool) (n int) {
	for _, is := range list {
		if is {
			n++
		}
	}
	return n
}

// xor is a Sealer that a test can read.
type xor struct{}

func (xor) Seal(dst, plain, about []byte) []byte {
	for k, b := range plain {
		dst = append(dst, b^about[k%len(about)]^0x55)
	}
	return append(dst, about[16:24]...)
}

func (xor) Open(dst, sealed, about []byte) ([]byte, error) {
	n := len(sealed) - 8
	if !bytes.Equal(sealed[n:], about[16:24]) {
		return nil, engine.ErrCorrupt
	}
	return xor{}.Seal(dst, sealed[:n], about)[:len(dst)+n], nil
}

// TestTier: blocks that were written are found by the next process, too, come by few requests, and
// are gone for good once they were removed.
func TestTier(t *testing.T) {
	for name, seal := range map[string]Sealer{"plain": nil, "sealed": xor{}} {
		t.Run(name, func(t *testing.T) {
			const blocks, size = 100, 5000
			f, sealed := newFake(), func(c *Config) { c.Seal = seal }
			tier := openTier(t, f, sealed)
			await(t, tier.isReady)
			for n := range blocks {
				require.True(t, put(t, tier, n, size, 0))
				require.False(t, put(t, tier, n, size, 0), "it has it")
			}
			keys := keysOf(0, blocks)
			require.NoError(t, tier.Close(t.Context()))
			require.Equal(t, blocks, tier.has(keys))
			require.ErrorIs(t, tier.Write(t.Context(), space, keyOf(0), cache.BelowBlock{}, nil),
				engine.ErrClosed)

			tier = openTier(t, f, sealed)
			await(t, tier.isReady)
			require.Equal(t, blocks, tier.has(keys))
			require.EqualValues(t, 7, tier.Find(space, keys)[3].Used)
			require.Zero(t, tier.has(keysOf(blocks, 3)))
			f.set(func(f *fake) { f.gets = 0 })
			require.Equal(t, blocks, count(read(t, tier, keys, size)))
			require.LessOrEqual(t, f.gets, 10) // one an object
			f.set(func(f *fake) { f.gets = 0 })
			require.Equal(t, 50, count(read(t, tier, keys[:50], size)))
			require.Zero(t, count(read(t, tier, keys[:50], size-1)), "another size")

			require.NoError(t, tier.Remove(t.Context(), space, keys[10:20]))
			require.NoError(t, tier.Remove(t.Context(), space, keysOf(blocks, 5)))
			require.Len(t, f.names(tombSuffix), 1)
			require.Equal(t, blocks-10, tier.has(keys))
			require.True(t, put(t, tier, 15, size, 0)) // again
			require.NoError(t, tier.Close(t.Context()))
			tier = openTier(t, f, sealed)
			await(t, tier.isReady)
			require.Equal(t, blocks-9, tier.has(keys))
			require.Equal(t, []bool{true}, read(t, tier, keys[15:16], size))

			// All that is left is deleted, and tombstones with the objects that they are for.
			require.NoError(t, tier.Remove(t.Context(), space, keys))
			await(t, func() bool { return len(f.names("")) == 0 })
			await(t, func() bool { f.mu.Lock(); defer f.mu.Unlock(); return f.aborted > 0 })
		})
	}
}

// TestRemoveBesideOthers: a block that is removed while it is written, or read, is gone.
func TestRemoveBesideOthers(t *testing.T) {
	const size = 5000
	f := newFake()
	tier := openTier(t, f, nil)
	await(t, tier.isReady)
	removes := func(n int) (ended chan error) {
		ended = make(chan error, 1)
		f.set(func(f *fake) {
			f.during = func() { ended <- tier.Remove(context.Background(), space, keysOf(n, 1)) }
		})
		return ended
	}
	written := removes(1)
	for n := range 3 {
		require.True(t, put(t, tier, n, size, 0))
	}
	require.NoError(t, <-written)
	await(t, func() bool { return tier.has(keysOf(0, 3)) == 2 })
	require.Len(t, f.names(tombSuffix), 1)
	loaded := removes(2)
	require.Equal(t, []bool{true, false, false}, read(t, tier, keysOf(0, 3), size))
	require.NoError(t, <-loaded)
	require.NoError(t, tier.Close(t.Context()))
	tier = openTier(t, f, nil)
	await(t, tier.isReady)
	require.Equal(t, 1, tier.has(keysOf(0, 3)))
}

// TestNoPartOfAnObject: a part of an object, or a changed one, is not taken for an object. Where
// only a block in it has changed, the others are read.
func TestNoPartOfAnObject(t *testing.T) {
	const blocks, size = 10, 5000
	f := newFake()
	tier := openTier(t, f, nil)
	await(t, tier.isReady)
	for n := range blocks {
		require.True(t, put(t, tier, n, size, 0))
	}
	require.NoError(t, tier.Close(t.Context()))
	name := f.names(packSuffix)[0]
	good := f.objects[name]
	at := func(n int, bits byte) func(p []byte) []byte { // changes the n-th byte from the end
		return func(p []byte) []byte { p[len(p)-n] ^= bits; return p }
	}
	for what, c := range map[string]struct {
		change func(p []byte) []byte
		has    int
	}{
		"nothing":   {func(p []byte) []byte { return p }, blocks},
		"cut":       {func(p []byte) []byte { return p[:len(p)-1] }, 0},
		"half":      {func(p []byte) []byte { return p[:len(p)/2] }, 0},
		"empty":     {func(p []byte) []byte { return nil }, 0},
		"its end":   {func(p []byte) []byte { return p[len(p)-footerBytes:] }, 0},
		"longer":    {func(p []byte) []byte { return append(p, 0) }, 0},
		"twice":     {func(p []byte) []byte { return append(p, p...) }, 0},
		"its magic": {at(footerBytes, 1), 0},
		"version":   {at(footerBytes-8, 1), 0},
		"records":   {at(footerBytes-12, 1), 0},
		"index":     {at(footerBytes+recordBytes, 1), 0},
		"its CRC":   {at(1, 1), 0},
	} {
		t.Run(what, func(t *testing.T) {
			f := newFake()
			f.objects[name] = c.change(slices.Clone(good))
			f.at[name] = time.Now().Add(-2 * orphanAge)
			f.objects["node/new"+packSuffix] = []byte("what is being written")
			f.at["node/new"+packSuffix] = time.Now()
			f.objects["node/theirs"], f.objects["other/x"+packSuffix] = nil, nil
			tier := openTier(t, f, nil)
			await(t, tier.isReady)
			require.Equal(t, c.has, tier.has(keysOf(0, blocks)))
			require.Equal(t, c.has, count(read(t, tier, keysOf(0, blocks), size)))
			left := 3 // the new one, and those of others
			if c.has > 0 {
				left++
			}
			await(t, func() bool { return len(f.names("")) == left })
		})
	}

	// A block whose bytes have changed, and an object that is gone.
	f.objects[name] = slices.Clone(good)
	f.objects[name][size*3+1] ^= 1
	tier = openTier(t, f, nil)
	await(t, tier.isReady)
	require.Equal(t, blocks-1, count(read(t, tier, keysOf(0, blocks), size)))
	require.EqualValues(t, 1, tier.Stats().Damaged)
	require.Equal(t, blocks-1, tier.has(keysOf(0, blocks)))
	require.NoError(t, f.Delete(t.Context(), name))
	require.Zero(t, count(read(t, tier, keysOf(0, 1), size)))
	require.Zero(t, tier.has(keysOf(0, blocks)))
	require.EqualValues(t, blocks-1, tier.Stats().Lost)
}

// TestDamagedTombstone: where a tombstone cannot be read, no older block is found, but later ones.
func TestDamagedTombstone(t *testing.T) {
	const size = 5000
	f := newFake()
	tier := openTier(t, f, nil)
	await(t, tier.isReady)
	for n := range 3 {
		require.True(t, put(t, tier, n, size, 0))
	}
	await(t, func() bool { return tier.has(keysOf(0, 3)) == 3 })
	require.NoError(t, tier.Remove(t.Context(), space, keysOf(1, 1)))
	require.True(t, put(t, tier, 3, size, 0))
	require.NoError(t, tier.Close(t.Context()))
	name := f.names(tombSuffix)[0]
	f.objects[name] = f.objects[name][1:]

	tier = openTier(t, f, nil)
	await(t, tier.isReady)
	require.Equal(t, 1, tier.has(keysOf(0, 4)))
	require.Equal(t, []bool{true}, read(t, tier, keysOf(3, 1), size))
	await(t, func() bool { return len(f.names("")) == 1 })
}

// TestRemoveOfWhatIsHidden: a block that the tier does not find, but a restart would, is removed
// for good, too: one that was damaged when it was read, and one of an object that is to be deleted.
func TestRemoveOfWhatIsHidden(t *testing.T) {
	const size = 5000
	for name, hide := range map[string]func(t *testing.T, tier *Tier, f *fake){
		"damaged": func(t *testing.T, tier *Tier, f *fake) {
			name := f.names(packSuffix)[0]
			good := f.objects[name]
			f.set(func(f *fake) {
				f.objects[name] = append(bytes.Repeat([]byte{1}, 2*size), good[2*size:]...)
			})
			require.Equal(t, 1, count(read(t, tier, keysOf(0, 3), size)))
			f.set(func(f *fake) { f.objects[name] = good })
		},
		"to be deleted": func(t *testing.T, tier *Tier, f *fake) {
			f.set(func(f *fake) { f.noDelete = errors.New("no delete") })
			tier.mu.Lock()
			tier.forgetPacks(func(*pack) bool { return true })
			tier.mu.Unlock()
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake()
			tier := openTier(t, f, nil)
			await(t, tier.isReady)
			for n := range 3 {
				require.True(t, put(t, tier, n, size, 0))
			}
			await(t, func() bool { return tier.has(keysOf(0, 3)) == 3 })
			hide(t, tier, f)
			require.NoError(t, tier.Remove(t.Context(), space, keysOf(0, 1)))
			tier.stop(errors.New("killed"))
			<-tier.ended
			tier = openTier(t, f, nil)
			await(t, tier.isReady)
			require.Zero(t, tier.has(keysOf(0, 1)))
		})
	}
}

// TestRemoveBeforeTheIndexes: once the store has been listed a Remove is for good, also where the
// indexes are not read yet.
func TestRemoveBeforeTheIndexes(t *testing.T) {
	const size = 5000
	f := newFake()
	tier := openTier(t, f, nil)
	await(t, tier.isReady)
	for n := range 3 {
		require.True(t, put(t, tier, n, size, 0))
	}
	require.NoError(t, tier.Close(t.Context()))
	removed := make(chan error, 1)
	f.set(func(f *fake) {
		f.during = func() { removed <- tier.Remove(context.Background(), space, keysOf(1, 1)) }
	})
	for range 2 { // this process, and the next one
		f.mu.Lock()
		next, err := Open(Config{Bucket: f, Prefix: "node/", Bytes: 64 << 20, PackBytes: 64 << 10,
			Timeout: time.Minute, rest: time.Millisecond, tombAge: time.Hour})
		tier = next
		f.mu.Unlock()
		require.NoError(t, err)
		await(t, tier.isReady)
		require.Equal(t, 2, tier.has(keysOf(0, 3)))
		require.NoError(t, tier.Close(t.Context()))
	}
	require.NoError(t, <-removed)
}

// TestStoreWithoutUploads: one that refuses to list uploads is used as others.
func TestStoreWithoutUploads(t *testing.T) {
	f := newFake()
	f.noUploads = fmt.Errorf("list uploads: %w", fs.ErrPermission)
	tier := openTier(t, f, nil)
	await(t, func() bool { f.mu.Lock(); defer f.mu.Unlock(); return f.aborted > 0 })
	for n := range 5 { // rounds
		require.True(t, put(t, tier, n, 5000, 0))
		await(t, func() bool { return tier.has(keysOf(n, 1)) == 1 })
	}
	require.Equal(t, 1, f.aborted)
}

// TestStoreThatFails: after errors the tier finds nothing, makes few requests, keeps what is to be
// written, and heals.
func TestStoreThatFails(t *testing.T) {
	const blocks, size = 20, 5000
	f := newFake()
	keys := keysOf(0, blocks)
	tier := openTier(t, f, func(c *Config) { c.rest = time.Hour })
	await(t, tier.isReady)
	for n := range blocks {
		require.True(t, put(t, tier, n, size, 0))
	}
	await(t, func() bool { return tier.has(keys) == blocks })
	broken := errors.New("no route")
	f.set(func(f *fake) { f.failing, f.requests = func() error { return broken }, 0 })
	for range 10 {
		require.Zero(t, count(read(t, tier, keys, size)))
	}
	f.set(func(f *fake) { // those that ran at that time
		require.LessOrEqual(t, f.requests, failuresMax+requestsMax)
	})
	require.Zero(t, tier.has(keys))
	require.False(t, put(t, tier, blocks, size, 0))
	require.Contains(t, tier.Stats().Unused, "no route")
	err := tier.Remove(t.Context(), space, keys[:1])
	require.ErrorIs(t, err, broken)
	require.ErrorContains(t, err, "a restart may find 1 blocks")

	// It works again: what is owed is written.
	f.set(func(f *fake) { f.failing = nil })
	tier.requests.mu.Lock()
	tier.requests.without = time.Time{}
	tier.requests.mu.Unlock()
	await(t, func() bool { return len(f.names(tombSuffix)) == 1 })
	require.Equal(t, blocks-1, tier.has(keys))
	require.Equal(t, blocks-1, count(read(t, tier, keys, size)))
	require.NoError(t, tier.Close(t.Context()))

	// It is not there at a start: nothing is found, and what is removed is removed.
	f.set(func(f *fake) { f.failing = func() error { return broken } })
	tier = openTier(t, f, nil)
	require.Zero(t, tier.has(keys))
	require.Error(t, tier.Remove(t.Context(), space, keys[1:2]))
	f.set(func(f *fake) { f.failing = nil })
	await(t, tier.isReady)
	require.Equal(t, blocks-2, tier.has(keys))
	await(t, func() bool { return len(f.names(tombSuffix)) == 2 })

	// It does not answer: a read ends with its ctx, and within the limit of the tier.
	f.set(func(f *fake) { f.hangs = true })
	soon, cancel := context.WithCancel(t.Context())
	cancel()
	require.Equal(t, []bool{false}, tier.Read(soon, space, keys[5:6], [][]byte{make([]byte, size)}))
	require.NoError(t, tier.Close(t.Context()))
	tier = openTier(t, f, func(c *Config) { c.Timeout, c.rest = time.Millisecond, time.Hour })
	await(t, func() bool { return strings.Contains(tier.Stats().Unused, "not answered") })
	require.Zero(t, count(read(t, tier, keys, size)))
}

// TestRetriesHaveABudget: many requests of a store that fails now and then make few retries.
func TestRetriesHaveABudget(t *testing.T) {
	f := newFake()
	f.objects["x"] = []byte("x")
	r := newRequests(f, time.Minute, 0)
	n := 0
	f.failing = func() error {
		if n++; n%2 == 1 {
			return errors.New("busy")
		}
		return nil
	}
	get := func() error {
		return r.do(t.Context(), "get", 1, func(ctx context.Context) error {
			return r.Get(ctx, "x", "", 0, [][]byte{make([]byte, 1)})
		})
	}
	for range 5 {
		require.NoError(t, get())
	}
	f.failing = func() error { return errors.New("busy") }
	for range 30 {
		require.Error(t, get())
	}
	require.LessOrEqual(t, r.retried, uint64(retriesMax+2))
	f.failing = func() error { return fs.ErrPermission }
	before := r.retried
	r.retries = retriesMax
	require.ErrorIs(t, get(), fs.ErrPermission)
	require.Equal(t, before, r.retried)
}

// TestBounds: objects never pass Bytes, those used longest ago go first, and expired ones are gone.
func TestBounds(t *testing.T) {
	const size, each = 5000, 12 // blocks an object
	f := newFake()
	tier := openTier(t, f, func(c *Config) {
		c.PackBytes = each * (size + sealMax)
		c.Bytes, c.Blocks, c.linger = uint64(4*c.PackBytes), 1000, time.Hour
	})
	await(t, tier.isReady)
	for n := range 20 * each {
		if n == 4*each { // the first objects are used, the others are not
			await(t, func() bool { return tier.has(keysOf(0, 3*each)) >= 2*each })
		}
		require.True(t, put(t, tier, n, size, 0))
		if n >= 4*each && n%each == 0 {
			require.Positive(t, count(read(t, tier, keysOf(0, 1), size)))
		}
	}
	require.NoError(t, tier.Close(t.Context()))
	require.LessOrEqual(t, f.most, 4*each*(size+sealMax))
	require.LessOrEqual(t, tier.Stats().Bytes, tier.Stats().Room)

	tier = openTier(t, f, func(c *Config) { c.TTL = time.Second })
	for _, o := range []Config{{}, {Prefix: "/x", Bytes: 1 << 30}, {Prefix: "x", Bytes: 1},
		{Prefix: "x", Bytes: 1 << 30, PackBytes: 1 << 30}} {
		require.ErrorIs(t, o.Check(), engine.ErrBounds)
	}
	await(t, func() bool { return len(f.names("")) == 0 }) // a second later

	// What is written has a rate, of which the second half is for blocks that were used again.
	tier = openTier(t, newFake(), func(c *Config) { c.BytesASecond = 1; c.linger = time.Hour })
	await(t, tier.isReady)
	n := 0
	for tier.Wants(space, keyOf(n), size, false) {
		n++
	}
	again := n
	for tier.Wants(space, keyOf(again), size, true) {
		again++
	}
	require.Equal(t, 64<<10/size+1, n) // until less than half is left
	require.Equal(t, 2*64<<10/size, again)
	require.EqualValues(t, 2, tier.Stats().Refused)
}

// TestModel: whatever the store does, a block that is read has its bytes, and one that was removed
// without an error is not found again, by no process.
func TestModel(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	const keys, size = 60, 3000
	f := newFake()
	gone := map[int]bool{} // removed, and not written since
	open := func() *Tier {
		return openTier(t, f, func(c *Config) {
			c.Bytes, c.Blocks, c.PackBytes = 8*10*(size+sealMax), 1000, 10*(size+sealMax)
		})
	}
	tier := open()
	fails := 0.0
	fr := rand.New(rand.NewPCG(seed, 1)) // guarded by f.mu
	f.set(func(f *fake) {
		f.failing = func() error {
			if fr.Float64() < fails {
				return errors.New("now and then")
			}
			return nil
		}
	})
	for range 1000 {
		n := r.IntN(keys)
		switch way := r.IntN(100); {
		case way < 40:
			if put(t, tier, n, size, 0) {
				delete(gone, n)
			}
		case way < 75:
			from := r.IntN(keys)
			part := keysOf(from, min(8, keys-from))
			for k, ok := range read(t, tier, part, size) {
				require.False(t, ok && gone[from+k], "block %d was removed", from+k)
			}
		case way < 90:
			err := tier.Remove(t.Context(), space, keysOf(n, 1))
			require.Zero(t, tier.has(keysOf(n, 1)))
			if gone[n] = err == nil; err != nil {
				delete(gone, n)
			}
		case way < 95:
			f.set(func(*fake) { fails = []float64{0, 0, 0.1, 0.5, 1}[r.IntN(5)] })
		case way < 97:
			f.set(func(*fake) { fails = 0 })
			await(t, tier.isReady)
		case way < 98: // killed
			tier.stop(fmt.Errorf("killed: %w", engine.ErrClosed))
			<-tier.ended
			tier = open()
		default:
			_ = tier.Close(t.Context())
			tier = open()
		}
	}
}

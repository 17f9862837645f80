// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	enc "encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/s3test"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/tier/object"
	"github.com/sluicehq/sluice/kv/tier/object/s3"
)

// TestCacheObjectStore: blocks that had to leave the memory of a server are in the object store,
// and come back after a boot; a store that is not there makes misses, and is used once it is. Where
// the node seals, the store has none of their bytes, and who has another key finds none.
func TestCacheObjectStore(t *testing.T) {
	t.Run("stand-in", func(t *testing.T) {
		s := s3test.NewStandIn(t)
		testCacheObjectStore(t, s.URL, s.SetDown, "")
	})
	t.Run("sealed", func(t *testing.T) {
		testCacheObjectStore(t, s3test.NewStandIn(t).URL, nil,
			secretFile(t, strings.Repeat("4b", 32), 0o600))
	})
	t.Run("versitygw", func(t *testing.T) { testCacheObjectStore(t, s3test.Real(t), nil, "") })
}

// inBucket reports how many of the blocks lie plain in a bucket.
func inBucket(ctx context.Context, t *testing.T, url string, keys []cache.Key) (n int) {
	t.Helper()
	b, err := s3.Open(s3.Config{Bucket: s3test.Bucket, Endpoint: url, PathStyle: true})
	require.NoError(t, err)
	var all []byte
	require.NoError(t, b.List(ctx, "", func(o object.Info) error {
		p := make([]byte, o.Size)
		all = append(all, p...)
		return b.Get(ctx, o.Name, "", 0, [][]byte{all[len(all)-len(p):]})
	}))
	require.NotEmpty(t, all)
	for k := range keys {
		word := enc.LittleEndian.AppendUint64(nil, contentWord(&keys[k], 1024))
		if bytes.Contains(all, word) {
			n++
		}
	}
	return n
}

func testCacheObjectStore(t *testing.T, url string, setDown func(down bool), seal string) {
	s3test.Environment(t)
	const block, room, each = 64 << 10, 64, 8
	dir := t.TempDir()
	config, socket := filepath.Join(dir, "cache.toml"), filepath.Join(dir, "s")
	sealing := ""
	if seal != "" {
		sealing = fmt.Sprintf("seal = %q", seal)
	}
	require.NoError(t, os.WriteFile(config, fmt.Appendf(nil, `name = "node"
%s
socket = %q
[memory]
path = %q
bytes = "4MiB"
[object]
bucket = %q
endpoint = %q
path_style = true
bytes = "64MiB"
pack_bytes = "256KiB"
`, sealing, socket, filepath.Join(dir, "memory"), s3test.Bucket, url), 0o600))
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	var keys []cache.Key
	for k := range room + 4*each {
		keys = append(keys, cache.KeyOf(fmt.Append(nil, k)))
	}
	connect := func() (s *cacheServer, u *cacheUser) {
		s = startCache(t, config)
		u, err := openModelUser(ctx, socket, "user", block, room+4*each)
		require.NoError(t, err)
		return s, u
	}
	end := func(s *cacheServer, u *cacheUser) {
		require.NoError(t, u.close())
		require.NoError(t, s.Process.Signal(syscall.SIGTERM))
		require.NoError(t, s.Wait())
		require.NoError(t, os.Remove(filepath.Join(dir, "memory"))) // as a boot does
	}

	s, u := connect()
	for at := 0; at < len(keys); at += each {
		for { // until what these push out is written, but for what waits for others
			r, err := u.Report(ctx)
			require.NoError(t, err)
			if int(r.Object.Written) >= at+each-room-3 && r.Object.Unused == "" {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		u.fill(keys[at : at+each])
		outcomes, err := u.Store(ctx, keys[at:at+each], u.place(each))
		require.NoError(t, err)
		require.NotContains(t, outcomes, cache.NoRoom)
	}
	require.Contains(t, ok(t, askCache(t, socket, "stat")).stdout, "object")
	end(s, u)
	if n := inBucket(ctx, t, url, keys); seal == "" {
		require.Greater(t, n, 3*each)
	} else {
		require.Zero(t, n)
	}

	s, u = connect()
	found := func() (which []cache.Key) {
		m, err := u.Match(ctx, keys)
		require.NoError(t, err)
		for k, f := range m.Blocks {
			if f.There() {
				which = append(which, keys[k])
			}
		}
		return which
	}
	awaitFound := func() (which []cache.Key) {
		for len(which) < 3*each { // the indexes are read
			which = found()
			time.Sleep(10 * time.Millisecond)
		}
		return which
	}
	which := awaitFound()
	outcomes, err := u.Load(ctx, which, u.place(len(which)))
	require.NoError(t, err)
	for k, o := range outcomes {
		require.Equal(t, cache.Done, o, "block %d of %d", k, len(which))
		require.True(t, u.verify(k, &which[k]))
	}
	end(s, u)
	if seal != "" {
		require.NoError(t, os.WriteFile(seal, []byte(strings.Repeat("5c", 32)), 0o600))
		s, u = connect()
		which = awaitFound()[:each]
		outcomes, err = u.Load(ctx, which, u.place(each))
		require.NoError(t, err)
		for _, o := range outcomes {
			require.Equal(t, cache.Missing, o)
		}
		r, err := u.Report(ctx)
		require.NoError(t, err)
		require.EqualValues(t, each, r.Object.Damaged)
		end(s, u)
	}
	if setDown == nil {
		return
	}

	setDown(true)
	s, u = connect()
	require.Empty(t, found())
	outcomes, err = u.Load(ctx, which[:1], u.place(1))
	require.NoError(t, err)
	require.Equal(t, []cache.Outcome{cache.Missing}, outcomes)
	setDown(false)
	awaitFound()
	end(s, u)
}

// TestLockStore: a process has the objects of its node alone, until it has ended.
func TestLockStore(t *testing.T) {
	path := filepath.Join(t.TempDir(), "memory.object")
	first, err := lockStore(t.Context(), path)
	require.NoError(t, err)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = lockStore(over, path)
	require.ErrorIs(t, err, engine.ErrBusy)
	go first.Close()
	second, err := lockStore(t.Context(), path)
	require.NoError(t, err)
	require.NoError(t, second.Close())
}

// TestLoadFromObjectStore: sluice load reads what lies below a prefix, or one object.
func TestLoadFromObjectStore(t *testing.T) {
	s3test.Environment(t)
	store := s3test.NewStandIn(t)
	bucket, err := s3.Open(s3.Config{Bucket: s3test.Bucket, Endpoint: store.URL, PathStyle: true})
	require.NoError(t, err)
	dir := t.TempDir()
	for name, sizes := range map[string][]int{"a": {20 << 20, 77}, "b": {100_000}} {
		text, err := os.ReadFile(shardFile(t, dir, name, sizes...))
		require.NoError(t, err)
		require.NoError(t, bucket.Put(t.Context(), "models/x/"+name+".safetensors", text))
	}
	require.NoError(t, bucket.Put(t.Context(), "models/x/config.json", []byte("{}")))
	require.NoError(t, bucket.Put(t.Context(), "models/xy/c.safetensors", []byte("other")))
	t.Setenv("AWS_ENDPOINT_URL", store.URL)
	at := "s3://" + s3test.Bucket + "/models/x"
	for args, want := range map[string]map[string]float64{
		at:                    {"files": 2, "tensors": 3, "bytes": 20<<20 + 77 + 100_000},
		at + "/":              {"files": 2},
		at + "/b.safetensors": {"files": 1, "tensors": 1, "bytes": 100_000},
	} {
		o := ok(t, sluice(t, "load", "--json", args))
		wantNumbers(t, decode(t, o.stdout).(map[string]any), want)
	}
	ranges, _ := store.Counts()
	require.Greater(t, ranges, 4)
	require.Contains(t, ok(t, sluice(t, "load", at)).stdout, "in an object store")
	for args, want := range map[string]string{
		"s3://" + s3test.Bucket + "/none":      "there is no such object",
		"s3://other/x":                         "bucket does not exist",
		"s3:///x":                              "want s3://BUCKET/PREFIX",
		"s3://" + s3test.Bucket + "/models/xy": "c.safetensors",
	} {
		o := sluice(t, "load", args)
		require.NotZero(t, o.status, args)
		require.Contains(t, o.stderr, want)
	}
	store.SetInstead("models/x/a.safetensors", 2, bytes.Repeat([]byte{1}, 30<<20))
	o := sluice(t, "load", at) // its header is of the file before
	require.NotZero(t, o.status)
	require.Contains(t, o.stderr, "has changed since it was listed")
	require.NotContains(t, o.stderr, s3test.Secret)
	store.SetDown(true)
	o = sluice(t, "load", at)
	require.NotZero(t, o.status)
	require.True(t, strings.Contains(o.stderr, "SlowDown") || bytes.Contains([]byte(o.stderr),
		[]byte("reduce")), o.stderr)
}

// SPDX-License-Identifier: Apache-2.0

package s3

import (
	"bytes"
	"context"
	"crypto/rand"
	"io/fs"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/s3test"
	"github.com/sluicehq/sluice/kv/tier/object"
)

// TestBucket: a stand-in and, where the machine has one, a real store keep the contract.
func TestBucket(t *testing.T) {
	t.Run("stand-in", func(t *testing.T) { testBucket(t, s3test.NewStandIn(t).URL) })
	t.Run("versitygw", func(t *testing.T) { testBucket(t, s3test.Real(t)) })
}

func testBucket(t *testing.T, url string) {
	s3test.Environment(t)
	b, err := Open(Config{Bucket: s3test.Bucket, Endpoint: url, PathStyle: true})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	want := map[string][]byte{"node/small": make([]byte, 1000),
		"node/long": make([]byte, 2*partBytes+12345), "node/deep/er": {1}, "other/x": {2}}
	for _, name := range []string{"a", "b", "c", "d", "e", "f", "g", "h"} {
		want["node/"+name] = []byte(name)
	}
	for name, p := range want {
		_, _ = rand.Read(p)
		require.NoError(t, b.Put(ctx, name, p), name)
	}
	seen := map[string]int64{}
	require.NoError(t, b.List(ctx, "node/", func(o object.Info) error {
		seen[o.Name] = o.Size
		require.Less(t, time.Since(o.At).Abs(), time.Hour)
		return nil
	}))
	require.Len(t, seen, len(want)-1)
	for name, p := range want {
		got := make([]byte, len(p))
		half := len(p) / 2
		require.NoError(t, b.Get(ctx, name, 0, [][]byte{got[:half], got[half:]}))
		require.True(t, bytes.Equal(p, got), name)
		require.NoError(t, b.Get(ctx, name, int64(half), [][]byte{got[half:]}))
		require.True(t, bytes.Equal(p, got), name)
	}
	require.Error(t, b.Get(ctx, "node/small", 990, [][]byte{make([]byte, 20)}), "beyond its end")
	require.ErrorIs(t, b.Get(ctx, "node/none", 0, [][]byte{make([]byte, 1)}), fs.ErrNotExist)
	require.NoError(t, b.Delete(ctx, "node/small"))
	require.NoError(t, b.Delete(ctx, "node/small"))
	require.ErrorIs(t, b.Get(ctx, "node/small", 0, [][]byte{make([]byte, 1)}), fs.ErrNotExist)
	require.NoError(t, b.AbortUploads(ctx, "node/", time.Now()))
	stop := fs.ErrExist
	require.ErrorIs(t, b.List(ctx, "node/", func(object.Info) error { return stop }), stop)

	none, err := Open(Config{Bucket: "no-such-bucket", Endpoint: url, PathStyle: true})
	require.NoError(t, err)
	err = none.Put(ctx, "x", nil)
	require.ErrorIs(t, err, fs.ErrPermission)
	require.ErrorContains(t, err, "make the bucket")
	over, end := context.WithCancel(ctx)
	end()
	require.ErrorIs(t, b.Put(over, "node/x", []byte("x")), context.Canceled)
	require.ErrorIs(t, b.List(over, "node/", func(object.Info) error { return nil }),
		context.Canceled)
}

func TestConfig(t *testing.T) {
	for _, c := range []Config{{}, {Bucket: "b", Endpoint: "host:9000"},
		{Bucket: "b", Endpoint: "ftp://host"}, {Bucket: "b", Endpoint: "http://host/path"}} {
		_, err := Open(c)
		require.ErrorIs(t, err, engine.ErrBounds, "%+v", c)
	}
	for text, want := range map[string][2]string{"s3://b/a/c": {"b", "a/c"}, "s3://b": {"b", ""},
		"s3:///x": {}, "http://b/x": {}} {
		bucket, name, ok := ParseURL(text)
		require.Equal(t, want[0] != "", ok, text)
		if ok {
			require.Equal(t, want, [2]string{bucket, name}, text)
		}
	}
}

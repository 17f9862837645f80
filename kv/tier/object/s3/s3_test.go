// SPDX-License-Identifier: Apache-2.0

package s3

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
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
		require.NoError(t, b.Get(ctx, name, "", 0, [][]byte{got[:half], got[half:]}))
		require.True(t, bytes.Equal(p, got), name)
		require.NoError(t, b.Get(ctx, name, "", int64(half), [][]byte{got[half:]}))
		require.True(t, bytes.Equal(p, got), name)
	}
	require.Error(t, b.Get(ctx, "node/small", "", 990, [][]byte{make([]byte, 20)}),
		"beyond its end")
	require.ErrorIs(t, b.Get(ctx, "node/none", "", 0, [][]byte{make([]byte, 1)}), fs.ErrNotExist)
	require.NoError(t, b.Delete(ctx, "node/small"))
	require.NoError(t, b.Delete(ctx, "node/small"))
	require.ErrorIs(t, b.Get(ctx, "node/small", "", 0, [][]byte{make([]byte, 1)}), fs.ErrNotExist)

	// A file of an object that changes, which is listed first.
	var listed object.Info
	require.NoError(t, b.List(ctx, "other/", func(o object.Info) error { listed = o; return nil }))
	file, p := object.Readers(ctx, b, time.Minute)(listed), make([]byte, 1)
	_, err = file.ReadAt(p, 0)
	require.NoError(t, err)
	require.Equal(t, want["other/x"], p)
	require.NoError(t, b.Put(ctx, "other/x", []byte{want["other/x"][0] + 1}))
	_, err = file.ReadAt(p, 0)
	require.ErrorIs(t, err, engine.ErrCorrupt)
	require.Equal(t, want["other/x"], p)

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

// TestStoreThatLies: what a store answers beside the question is an error, of bounded length.
func TestStoreThatLies(t *testing.T) {
	s3test.Environment(t)
	p := bytes.Repeat([]byte("x"), 1000)
	endless := func(w http.ResponseWriter) {
		for _, err := w.Write(p); err == nil; _, err = w.Write(p) {
		}
	}
	page := "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>1" +
		"</NextContinuationToken><Contents><Key>node/a</Key></Contents></ListBucketResult>"
	for what, answer := range map[string]http.HandlerFunc{
		"all of it": func(w http.ResponseWriter, r *http.Request) { _, _ = w.Write(p) },
		"an error":  func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "<Error/>") },
		"endless":   func(w http.ResponseWriter, r *http.Request) { endless(w) },
		"endless error": func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusBadRequest)
			endless(w)
		},
		"elsewhere": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Range", "bytes 0-9/1000")
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(p[:10])
		},
		"short": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Range", "bytes 10-19/1000")
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(p[:9])
		},
		"another place": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://"+r.Host+"/other", http.StatusTemporaryRedirect)
		},
	} {
		t.Run(what, func(t *testing.T) {
			server := httptest.NewServer(answer)
			defer server.Close()
			b, err := Open(Config{Bucket: s3test.Bucket, Endpoint: server.URL, PathStyle: true})
			require.NoError(t, err)
			err = b.Get(t.Context(), "node/a", "", 10, [][]byte{make([]byte, 10)})
			require.Error(t, err)
			require.NotErrorIs(t, err, fs.ErrNotExist)
			require.NotContains(t, err.Error(), s3test.Secret)
			require.Less(t, len(err.Error()), 4<<10)
			require.Error(t, b.List(t.Context(), "node/", func(object.Info) error { return nil }))
		})
	}
	t.Run("pages without end", func(t *testing.T) {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, page)
		}))
		defer server.Close()
		b, err := Open(Config{Bucket: s3test.Bucket, Endpoint: server.URL, PathStyle: true})
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.ErrorIs(t, b.List(ctx, "node/", func(object.Info) error { return nil }),
			context.DeadlineExceeded)
	})
}

func TestConfig(t *testing.T) {
	for _, c := range []Config{{}, {Bucket: "b", Endpoint: "host:9000"},
		{Bucket: "b", Endpoint: "ftp://host"}, {Bucket: "b", Endpoint: "http://u:secret@host"},
		{Bucket: "b", Endpoint: "http://u:secret@host:port"},
		{Bucket: "b", Endpoint: "http://host/path"}} {
		_, err := Open(c)
		require.ErrorIs(t, err, engine.ErrBounds, "%+v", c)
		require.NotContains(t, err.Error(), "secret")
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

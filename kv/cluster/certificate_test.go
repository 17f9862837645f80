// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/identity"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
	"github.com/sluicehq/sluice/kv/directory"
)

// TestCertificates: over a network a node is reached where its certificate is for the name that the
// directory has, and at none of its addresses otherwise; and there the lists of a namespace count.
func TestCertificates(t *testing.T) {
	authority, pair, err := testkit.NewAuthority("cluster", time.Hour)
	require.NoError(t, err)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	require.NoError(t, os.WriteFile(ca, pair.Cert, 0o600))
	open := func(name string) (*engine.Engine, *identity.Identity) {
		pair, _, err := authority.Issue(testkit.Member{Name: name + ".cluster", Valid: time.Hour})
		require.NoError(t, err)
		cert, key, err := pair.Store(t.TempDir(), name)
		require.NoError(t, err)
		id, err := identity.FromFiles(cert, key, ca)
		require.NoError(t, err)
		b, err := tcp.New(tcp.Config{Listen: "127.0.0.1:0", Identity: id})
		require.NoError(t, err)
		e, err := engine.Open(engine.Config{Name: name, Identity: id,
			Backends: []driver.Backend{b}})
		require.NoError(t, err)
		return e, id
	}

	e, _ := open("a")
	c, err := cache.Open(t.Context(), cache.Config{Engine: e, Memory: cache.MemoryConfig{
		Path: filepath.Join(t.TempDir(), "memory"), Bytes: 2 * chainKeys * blockBytes,
		Extent: 8 * blockBytes}, Blocks: 2 * chainKeys})
	require.NoError(t, err)
	var closed atomic.Bool // to all
	s, err := serve.New(serve.Config{Cache: c, Engine: e, Access: func(string) serve.Access {
		if closed.Load() {
			return serve.Access{Readers: []string{"a"}, Writers: []string{"a"}}
		}
		return serve.Access{}
	}})
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	served, ran := make(chan error, 1), make(chan error, 1)
	go func() { served <- e.Serve(ctx, l) }()
	go func() { ran <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		<-served
		require.NoError(t, <-ran)
		require.NoError(t, c.Close())
		require.NoError(t, e.Close())
	})

	for certificate, state := range map[string]State{"a.cluster": Serving, "": Serving,
		"b.cluster": Unreachable} {
		d, err := directory.List([]directory.Node{{Name: "a", Weight: 1, Certificate: certificate,
			Addresses: []string{"unix:/no/such.sock", "tcp:" + l.Addr().String()}}}, nil)
		require.NoError(t, err)
		e, id := open("user")
		m, err := e.Alloc(2*chainKeys*blockBytes, engine.AllocOptions{})
		require.NoError(t, err)
		u := &user{mem: m.Bytes(), keys: chainOf(1)}
		u.region, err = e.RegisterPrivate("kv", m.Segment())
		require.NoError(t, err)
		u.Cluster, err = Open(t.Context(), Config{Engine: e, Directory: d, Identity: id,
			Limit: time.Minute})
		require.NoError(t, err)
		u.await(t, "a", state)
		if state == Serving {
			require.NoError(t, u.Attach(t.Context(), u.region))
			u.Space, err = u.Namespace(t.Context(), "model"+certificate, [32]byte{1})
			require.NoError(t, err)
			u.store(t)
			u.load(t, all)

			// What the lists of the namespace refuse is an error, and no miss.
			closed.Store(true)
			require.NoError(t, s.Reassign())
			_, err = u.Match(t.Context(), u.keys)
			require.ErrorIs(t, err, os.ErrPermission)
			_, err = u.Load(t.Context(), u.keys, place(u, 0, chainKeys))
			require.ErrorIs(t, err, os.ErrPermission)
			_, err = u.Store(t.Context(), u.keys, place(u, 0, chainKeys))
			require.ErrorIs(t, err, os.ErrPermission)
			require.ErrorIs(t, u.Remove(t.Context(), u.keys), os.ErrPermission)
			_, err = u.Namespace(t.Context(), "other", [32]byte{1})
			require.ErrorIs(t, err, os.ErrPermission)
			closed.Store(false)
			require.NoError(t, s.Reassign())
			u.load(t, all)
		} else {
			require.Contains(t, u.Stats().Nodes[0].Why, "b.cluster")
		}
		require.NoError(t, u.Cluster.Close(t.Context()))
		require.NoError(t, e.Close())
	}
}

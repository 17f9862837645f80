// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// openShm opens an engine over shm with one region of its own.
func openShm(t testing.TB, name string, n uint64, onPeer func(*engine.Peer)) (*engine.Engine,
	*engine.Region) {
	t.Helper()
	b, err := shm.New(shm.Config{})
	require.NoError(t, err)
	e, err := engine.Open(engine.Config{Name: name, Backends: []driver.Backend{b}, OnPeer: onPeer})
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Errorf("close %s: %v", name, err)
		}
	})
	buffer, err := hostmem.Alloc(n, hostmem.Options{Purpose: "test"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = buffer.Close() })
	r, err := e.Register(name, buffer.Segment())
	require.NoError(t, err)
	return e, r
}

// TestOverShm takes the whole way that two programs on one host take.
func TestOverShm(t *testing.T) {
	leak.Check(t, hostmem.InUse)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	came := make(chan *engine.Peer, 1)
	decode, kv := openShm(t, "decode", 8<<20, func(p *engine.Peer) { came <- p })
	prefill, src := openShm(t, "prefill", 8<<20, nil)
	socket := filepath.Join(t.TempDir(), "decode")
	l, err := net.Listen("unix", socket)
	require.NoError(t, err)
	served := make(chan error, 1)
	serveCtx, stop := context.WithCancel(ctx)
	go func() { served <- decode.Serve(serveCtx, l) }()
	p, err := prefill.Dial(ctx, "unix", socket)
	require.NoError(t, err)
	stop()
	if err := <-served; !errors.Is(err, context.Canceled) {
		t.Errorf("serve: %v", err)
	}
	back := <-came
	m, err := p.Remote("decode")
	require.NoError(t, err)
	for i := range src.Bytes() {
		src.Bytes()[i] = byte(i*13 + i>>10)
	}
	w, err := prefill.NewTransfer(p, engine.Write, engine.Route{Only: "shm"})
	require.NoError(t, err)
	require.NoError(t, errors.Join(w.Add(src, 0, m, 0, 8<<20), w.Notify([]byte("all"))))
	for range 3 {
		clear(kv.Bytes())
		require.NoError(t, errors.Join(w.Post(), w.Wait(ctx)))
		select {
		case n := <-decode.Notifications():
			if n.Peer != back || string(n.Data) != "all" {
				t.Errorf("notified %q by %v", n.Data, n.Peer)
			}
		case <-ctx.Done():
			t.Fatal("no notification")
		}
		if !bytes.Equal(kv.Bytes(), src.Bytes()) {
			t.Fatal("other bytes arrived")
		}
	}

	lease, err := kv.Lease(4096, 1<<20, engine.LeaseOptions{})
	require.NoError(t, err)
	leased, err := p.Import(lease.Token())
	require.NoError(t, err)
	if _, err := leased.WriteAt([]byte("x"), 0); err != nil {
		t.Fatal(err)
	}
	require.NoError(t, lease.Revoke(ctx))
	if _, err := leased.WriteAt([]byte("y"), 0); !errors.Is(err, engine.ErrRevoked) {
		t.Errorf("write after Revoke: %v", err)
	}
	if kv.Bytes()[4096] != 'x' {
		t.Errorf("the byte is %q", kv.Bytes()[4096])
	}
	require.NoError(t, errors.Join(w.Close(), leased.Close()))
	if err := back.Close(); err != nil {
		t.Error(err)
	}
	select {
	case n := <-prefill.Notifications():
		if !errors.Is(n.Err, engine.ErrPeerLost) {
			t.Errorf("got %+v", n)
		}
	case <-ctx.Done():
		t.Error("the end of the peer is not told")
	}
}

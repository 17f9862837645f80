// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// TestLayer is what a program does for a layer of a KV cache: it goes to host memory when the
// kernels behind an event have written it, and a stream of the program overwrites it when it has
// gone. The program waits for nothing until the end.
func TestLayer(t *testing.T) {
	r := newRig(t, testConfig())
	const n = 1 << 20
	seg, owner, err := r.b.AllocDevice(0, 4*n)
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := errors.Join(r.b.Close(), owner.Close()); err != nil {
			t.Error(err)
		}
	})
	first, second := r.memory(hbm, n), r.memory(hbm, n)
	want := r.content(first)
	e, err := engine.Open(engine.Config{Name: "decode", Backends: []driver.Backend{r.b}})
	require.NoError(t, err)
	t.Cleanup(func() { _ = e.Close() })
	pool, err := e.Alloc(n, engine.AllocOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = e.Close(); _ = pool.Close() })
	p := newProducer(t)
	defer p.close()
	layer, err := seg.Slice(2*n, n, [16]byte{})
	p.must(err)
	p.must(r.b.StartAfter(layer, p.event))
	post, wait := r.layer(e, seg, pool, 2*n, n)
	if libcuda != nil {
		libcuda.Set(t, "hold", 1)
	}

	p.must(p.Copy(first.m.base, first.m.base, 13)) // what a kernel takes: the stand-in holds it
	p.must(p.Copy(layer.Addr, first.m.base, n))
	p.must(p.Record(p.event))
	post()
	waited, err := r.b.StreamWait(p.Handle(), layer)
	if err != nil || libcuda != nil && waited != 1 { // a card may be through
		t.Fatalf("waits for %d batches, %v, want 1", waited, err)
	}
	p.must(p.Copy(layer.Addr, second.m.base, n))
	if libcuda != nil {
		r.release()
	}

	wait()
	r.same("the layer as its kernels wrote it", pool.Bytes(), want)
	p.must(p.Sync())
	p.must(r.b.StartAfter(layer, 0))
}

// layer makes a transfer from a part of device memory to host memory.
func (r *rig) layer(e *engine.Engine, seg driver.Segment, pool *engine.Memory, off, n uint64) (post,
	wait func()) {
	r.t.Helper()
	must := func(err error) {
		r.t.Helper()
		require.NoError(r.t, err)
	}
	host, err := e.Register("pool", pool.Segment())
	must(err)
	_, err = e.Register("kv", seg)
	must(err)
	self, err := e.Self()
	must(err)
	kv, err := self.Remote("kv")
	must(err)
	t, err := e.NewTransfer(self, engine.Read, engine.Route{})
	must(err)
	must(t.Add(host, 0, kv, off, n))
	return func() { must(t.Post()) }, func() {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		must(t.Wait(ctx))
		must(t.Close())
	}
}

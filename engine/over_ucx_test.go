// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"bytes"
	"context"
	"strings"
	"testing"
	"time"

	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/backends/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/engine"
)

// openShmAndUCX opens an engine over both, with one region of the engine's memory.
func openShmAndUCX(t *testing.T, name string) (*engine.Engine, *engine.Region) {
	t.Helper()
	u, err := ucx.New(ucx.Config{})
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	s, err := shm.New(shm.Config{})
	if err != nil {
		t.Fatal(err)
	}
	e, err := engine.Open(engine.Config{Name: name, Backends: []driver.Backend{s, u}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Errorf("close %s: %v", name, err)
		}
	})
	m, err := e.Alloc(8<<20, engine.AllocOptions{Purpose: "test"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	r, err := e.Register(name, m.Segment())
	if err != nil {
		t.Fatal(err)
	}
	return e, r
}

// TestShmBeforeUCXOnOneHost: by cost, and the explanation says so. Only is obeyed all
// the same.
func TestShmBeforeUCXOnOneHost(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	prefill, src := openShmAndUCX(t, "prefill")
	decode, dst := openShmAndUCX(t, "decode")
	d, err := decode.Describe()
	if err != nil {
		t.Fatal(err)
	}
	p, err := prefill.Connect(ctx, d)
	if err != nil {
		t.Fatal(err)
	}
	m, err := p.Remote("decode")
	if err != nil {
		t.Fatal(err)
	}
	x, err := prefill.Explain(p, src, m)
	if err != nil {
		t.Fatal(err)
	}
	if x.Chosen != "shm" || len(x.Candidates) != 2 || !x.Candidates[0].Usable ||
		!x.Candidates[1].Usable ||
		x.Candidates[0].Estimate >= x.Candidates[1].Estimate {
		t.Errorf("%+v", x)
	}
	for _, want := range []string{"shm is the cheapest of 2 that can", "* shm", "  ucx ",
		"near (this host"} {
		if !strings.Contains(x.String(), want) {
			t.Errorf("%q does not say %q", x.String(), want)
		}
	}
	for i, want := range []string{"shm", "ucx"} {
		only := []string{"", "ucx"}[i]
		before := routeBytes(prefill, want)
		tr, err := prefill.NewTransfer(p, engine.Write, engine.Route{Only: only})
		if err != nil {
			t.Fatal(err)
		}
		for k := range src.Bytes() {
			src.Bytes()[k] = byte(k>>8 + i + 1)
		}
		if err := tr.Add(src, 0, m, 0, 1<<20); err != nil {
			t.Fatal(err)
		}
		if err := tr.Post(); err != nil {
			t.Fatal(err)
		}
		if err := tr.Wait(ctx); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(src.Bytes()[:1<<20], dst.Bytes()[:1<<20]) {
			t.Errorf("only %q: other bytes arrived", only)
		}
		if got := routeBytes(prefill, want) - before; got != 1<<20 {
			t.Errorf("only %q: %d bytes went by %s", only, got, want)
		}
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
	}
}

// routeBytes is what an engine has moved by a backend.
func routeBytes(e *engine.Engine, backend string) (n uint64) {
	for _, r := range e.Stats().Routes {
		if r.Backend == backend {
			n += r.Bytes
		}
	}
	return n
}

// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"bytes"
	"cmp"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/posix"
	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/backends/tcp"
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
	require.NoError(t, err)
	e, err := engine.Open(engine.Config{Name: name, Backends: []driver.Backend{s, u}})
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Errorf("close %s: %v", name, err)
		}
	})
	m, err := e.Alloc(8<<20, engine.AllocOptions{Purpose: "test"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = m.Close() })
	r, err := e.Register(name, m.Segment())
	require.NoError(t, err)
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
	require.NoError(t, err)
	p, err := prefill.Connect(ctx, d)
	require.NoError(t, err)
	m, err := p.Remote("decode")
	require.NoError(t, err)
	x, err := prefill.Explain(p, src, m)
	require.NoError(t, err)
	if x.Chosen != "shm" || len(x.Candidates) != 2 || !x.Candidates[0].Usable ||
		!x.Candidates[1].Usable ||
		x.Candidates[0].Estimate >= x.Candidates[1].Estimate {
		t.Errorf("%+v", x)
	}
	for _, want := range []string{"shm is the cheapest of 2 that can", "* shm", "  ucx ",
		"this host, which ucx reaches over the network like any other"} {
		if !strings.Contains(x.String(), want) {
			t.Errorf("%q does not say %q", x.String(), want)
		}
	}
	for i, want := range []string{"shm", "ucx"} {
		only := []string{"", "ucx"}[i]
		before := routeBytes(prefill, want)
		tr, err := prefill.NewTransfer(p, engine.Write, engine.Route{Only: only})
		require.NoError(t, err)
		for k := range src.Bytes() {
			src.Bytes()[k] = byte(k>>8 + i + 1)
		}
		require.NoError(t, tr.Add(src, 0, m, 0, 1<<20))
		require.NoError(t, tr.Post())
		require.NoError(t, tr.Wait(ctx))
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

// openUCXAndTCP opens an engine over UCX's TCP, the backend tcp and files, with one region.
func openUCXAndTCP(t *testing.T, name string) (*engine.Engine, *engine.Region) {
	t.Helper()
	u, err := ucx.New(ucx.Config{Transports: "tcp"})
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	n, err := tcp.New(tcp.Config{Listen: "127.0.0.1:0"})
	require.NoError(t, err)
	disk, err := posix.New(posix.Config{})
	require.NoError(t, err)
	e, err := engine.Open(engine.Config{Name: name, Backends: []driver.Backend{u, n, disk}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.Close()) })
	m, err := e.Alloc(1<<20, engine.AllocOptions{Purpose: "test"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = m.Close() })
	r, err := e.Register(name, m.Segment())
	require.NoError(t, err)
	return e, r
}

// TestTCPBeforeUCXOverTCP: where UCX has nothing better than TCP, bytes and messages go by the
// backend that does that itself. Only is obeyed all the same.
func TestTCPBeforeUCXOverTCP(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	prefill, src := openUCXAndTCP(t, "prefill")
	decode, dst := openUCXAndTCP(t, "decode")
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, f.Truncate(1<<20))
	_, err = decode.Register("file",
		driver.Segment{Kind: driver.File, FD: int(f.Fd()), Len: 1 << 20})
	require.NoError(t, err)
	d, err := decode.Describe()
	require.NoError(t, err)
	p, err := prefill.Connect(ctx, d)
	require.NoError(t, err)
	m, err := p.Remote("decode")
	require.NoError(t, err)
	x, err := prefill.Explain(p, src, m)
	require.NoError(t, err)
	require.Equal(t, "tcp", x.Chosen, x.String())
	require.Equal(t, "tcp is the cheapest of 2 that can; ucx only where no other can", x.Why)
	require.True(t, x.Candidates[0].Usable, x.String())

	file, err := p.Remote("file")
	require.NoError(t, err)
	x, err = prefill.Explain(p, src, file)
	require.NoError(t, err)
	require.Equal(t, engine.Staged, x.Chosen, x.String())
	require.Contains(t, x.String(), "-tcp-")

	for _, only := range []string{"", "ucx"} {
		want := cmp.Or(only, "tcp")
		before := routeBytes(prefill, want)
		tr, err := prefill.NewTransfer(p, engine.Read, engine.Route{Only: only})
		require.NoError(t, err)
		require.NoError(t, tr.Add(src, 0, m, 0, 1<<20))
		require.NoError(t, tr.Notify([]byte(want)))
		for range 2 { // what was measured changes nothing
			copy(dst.Bytes(), want)
			clear(src.Bytes())
			require.NoError(t, tr.Post())
			require.NoError(t, tr.Wait(ctx))
			require.Equal(t, dst.Bytes(), src.Bytes())
			select {
			case n := <-decode.Notifications():
				require.Equal(t, want, n.Backend)
			case <-ctx.Done():
				require.Fail(t, "no message came")
			}
		}
		require.EqualValues(t, 2<<20, routeBytes(prefill, want)-before)
		require.NoError(t, tr.Close())
	}
}

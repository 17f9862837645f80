// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// limit bounds every wait of these tests.
const limit = 30 * time.Second

func within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	t.Cleanup(cancel)
	return ctx
}

// open opens an engine over mem, or over the backends given, and closes it. Where a test does not
// say otherwise, what has to end within AbortGrace has as long as the test itself.
func open(t testing.TB, name string, change ...func(*Config)) *Engine {
	t.Helper()
	cfg := Config{Name: name, AbortGrace: limit, Spin: testkit.Spin()}
	for _, f := range change {
		f(&cfg)
	}
	if cfg.Backends == nil {
		b := newMem(t)
		cfg.Backends = []driver.Backend{b}
	}
	e, err := Open(cfg)
	require.NoError(t, err)
	broken := slices.ContainsFunc(cfg.Backends, func(b driver.Backend) bool {
		f, ok := b.(*fake)
		return ok && f.brokenClose
	})
	if _, known := afterEngines.LoadOrStore(t, &[]func(){}); !known {
		t.Cleanup(func() {
			list, _ := afterEngines.LoadAndDelete(t)
			for _, f := range *list.(*[]func()) {
				f()
			}
		})
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil && !(broken && errors.Is(err, ErrUnproven)) {
			t.Errorf("close engine %s: %v", name, err)
		}
	})
	return e
}

// afterEngines holds, by test, functions to call once its engines are closed.
var afterEngines sync.Map

// afterClose does f at the end of a test, behind the Close of all its engines: where a test ends
// early, what a peer has under way may use memory until then.
func afterClose(t testing.TB, f func()) {
	if list, ok := afterEngines.Load(t); ok {
		*list.(*[]func()) = append(*list.(*[]func()), f)
		return
	}
	t.Cleanup(f)
}

// hurry gives an engine little grace from here on. What came before, as a connection, is not what
// should fail where the machine is slow.
// Preconditions: the engine is at rest, or waits for what the test holds back.
func hurry(t testing.TB, e *Engine, grace time.Duration) {
	t.Helper()
	e.sweeper.sweeping.Lock()
	defer e.sweeper.sweeping.Unlock()
	e.cfg.AbortGrace, e.sweeper.period = grace, min(max(grace/8, time.Millisecond), time.Second)
}

func register(t testing.TB, e *Engine, name string, n uint64) *Region {
	t.Helper()
	b, err := e.Alloc(n, AllocOptions{Purpose: "test"})
	require.NoError(t, err)
	afterClose(t, func() { _ = b.Close() })
	r, err := e.Register(name, b.Segment())
	require.NoError(t, err)
	return r
}

func connect(t testing.TB, from, to *Engine) *Peer {
	t.Helper()
	d, err := to.Describe()
	require.NoError(t, err)
	p, err := from.Connect(within(t), d)
	require.NoError(t, err)
	return p
}

func remote(t testing.TB, p *Peer, name string) *Remote {
	t.Helper()
	m, err := p.Remote(name)
	require.NoError(t, err)
	return m
}

// check fails the test on an error.
func check(t testing.TB, err error) {
	t.Helper()
	require.NoError(t, err)
}

// wantErr fails the test unless err is want and says text.
func wantErr(t testing.TB, err, want error, text string) {
	t.Helper()
	require.ErrorIs(t, err, want)
	require.ErrorContains(t, err, text)
}

// put writes the first n bytes of a region.
func put(p *Peer, r *Region, m *Remote, n uint64) error {
	tr, err := p.e.NewTransfer(p, Write, Route{})
	if err != nil {
		return err
	}
	if err = tr.Add(r, 0, m, 0, n); err == nil {
		err = tr.Post()
	}
	if err == nil {
		err = tr.Wait(context.Background())
	}
	return errors.Join(err, tr.Close())
}

func transfer(t testing.TB, p *Peer, op Op) *Transfer {
	t.Helper()
	tr, err := p.e.NewTransfer(p, op, Route{})
	check(t, err)
	t.Cleanup(func() {
		_ = tr.Abort(context.Background())
		_ = tr.Close()
	})
	return tr
}

func fill(b []byte, seed byte) {
	for i := range b {
		b[i] = byte(i)*7 + byte(i>>8) + seed
	}
}

func TestWriteThenRead(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	prefill, decode := open(t, "prefill"), open(t, "decode")
	src, dst := register(t, prefill, "src", 1<<20), register(t, decode, "dst", 1<<20)
	back := register(t, prefill, "back", 1<<20)
	fill(src.Bytes(), 3)
	p := connect(t, prefill, decode)
	m := remote(t, p, "dst")

	w := transfer(t, p, Write)
	check(t, w.Add(src, 0, m, 100, 1000))
	check(t, w.Add(src, 1000, m, 1100, 1<<19))
	check(t, w.Post())
	check(t, w.Wait(within(t)))
	require.True(t, bytes.Equal(dst.Bytes()[100:100+1000+1<<19], src.Bytes()[:1000+1<<19]),
		"other bytes arrived")
	if dst.Bytes()[99] != 0 || dst.Bytes()[100+1000+1<<19] != 0 {
		t.Error("a byte outside the range changed")
	}
	require.Len(t, w.groups[0].descs, 1,
		"descriptors, want the two adjacent ones merged")

	r := transfer(t, p, Read)
	check(t, r.Add(back, 0, m, 100, 1000))
	check(t, r.Post())
	check(t, r.Wait(within(t)))
	require.True(t, bytes.Equal(back.Bytes()[:1000], src.Bytes()[:1000]),
		"the read brought other bytes")
}

func TestMisuse(t *testing.T) {
	e := open(t, "one")
	r := register(t, e, "r", 1<<16)
	require.ErrorIs(t, second(e.Register("r", r.seg)), ErrBusy, "a name twice")
	p, err := e.Self()
	check(t, err)
	m := remote(t, p, "r")
	tr := transfer(t, p, Write)
	require.ErrorIs(t, tr.Post(), ErrBounds, "empty post")
	require.ErrorIs(t, tr.Wait(within(t)), ErrBusy, "wait for an idle transfer")
	for _, bad := range [][3]uint64{{0, 0, 0}, {0, 0, 1<<16 + 1}, {1, 0, 1 << 16}, {0, 1 << 16, 1},
		{1 << 63, 0, 1 << 63}, {0, ^uint64(0), 2}} {
		require.ErrorIs(t, tr.Add(r, bad[0], m, bad[1], bad[2]), ErrBounds, "add %v", bad)
	}
	check(t, tr.Add(r, 0, m, 1<<15, 100))
	require.ErrorIs(t, r.Close(), ErrBusy, "close a region in use")
	check(t, tr.Post())
	check(t, tr.Wait(within(t)))
	check(t, tr.Post()) // made once, posted many times
	check(t, tr.Wait(within(t)))
	check(t, tr.Close())
	require.ErrorIs(t, tr.Post(), ErrClosed, "post after close")
	check(t, r.Close())
	require.ErrorIs(t, second(p.Remote("r")), ErrNoRoute, "a region that is gone")
}

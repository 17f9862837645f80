// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// landlord is mem with memory of its own.
type landlord struct {
	*mem.Backend
	name   string
	fault  error        // of every Alloc
	leased atomic.Int64 // bytes
}

func newLandlord(t testing.TB, name string) *landlord {
	t.Helper()
	b, err := mem.New(mem.Config{})
	check(t, err)
	return &landlord{Backend: b, name: name}
}

func (l *landlord) Caps() driver.Caps {
	c := l.Backend.Caps()
	c.Name = l.name
	return c
}

func (l *landlord) Alloc(n uint64) (driver.Segment, io.Closer, error) {
	if l.fault != nil {
		return driver.Segment{}, nil, l.fault
	}
	if n == 0 || n > 1<<40 {
		return driver.Segment{}, nil, driver.ErrBounds
	}
	b, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|
		unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		return driver.Segment{}, nil, err
	}
	l.leased.Add(int64(n))
	return driver.Segment{Kind: driver.DRAM, Len: n, Mem: b}, closer(sync.OnceValue(func() error {
		l.leased.Add(-int64(n))
		return unix.Munmap(b)
	})), nil
}

type closer func() error

func (f closer) Close() error { return f() }

func over(list ...driver.Backend) func(*Config) {
	return func(c *Config) { c.Backends = list }
}

func alloc(t testing.TB, e *Engine, n uint64, o AllocOptions) *Memory {
	t.Helper()
	m, err := e.Alloc(n, o)
	check(t, err)
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Errorf("close memory: %v", err)
		}
	})
	return m
}

func TestAllocIsHostMemoryWithoutAnAllocator(t *testing.T) {
	leak.Check(t)
	e := open(t, "plain")
	m := alloc(t, e, 1<<20, AllocOptions{Purpose: "pool", NoHuge: true, Populate: true})
	if m.From() != "host" || m.Segment().Shared == nil || len(m.Bytes()) != 1<<20 {
		t.Errorf("memory from %q, segment %+v", m.From(), m.Segment())
	}
	if got := MemoryInUse()["pool"]; got != 1<<20 {
		t.Errorf("%d bytes in use", got)
	}
}

// TestAllocIsTheFirstBackends: with two that have memory the first decides, and
// the second gives some when it is named.
func TestAllocIsTheFirstBackends(t *testing.T) {
	leak.Check(t)
	first, second := newLandlord(t, "first"), newLandlord(t, "second")
	e := open(t, "tenant", over(first, second))
	for name, o := range map[string]AllocOptions{"first": {Purpose: "pool"},
		"second": {Purpose: "pool", Backend: "second"}} {
		m := alloc(t, e, 10_000, o)
		if m.From() != name || len(m.Bytes()) != 10_000 || m.Segment().Len != 10_000 {
			t.Errorf("%+v: memory from %q, want %q; %d bytes", o, m.From(), name, len(m.Bytes()))
		}
	}
	if first.leased.Load() != 10_000 || second.leased.Load() != 10_000 {
		t.Errorf("leased %d and %d bytes, want 10,000 each", first.leased.Load(),
			second.leased.Load())
	}
}

func TestAllocIsHostMemoryIfTheFirstBackendHasNone(t *testing.T) {
	leak.Check(t)
	none, b := newLandlord(t, "none"), newLandlord(t, "second")
	none.fault = driver.ErrNotSupported
	plain, err := mem.New(mem.Config{})
	check(t, err)
	for name, list := range map[string][]driver.Backend{"no allocator": {plain, b},
		"not as configured": {none}} {
		e := open(t, "tenant", over(list...))
		if m := alloc(t, e, 1, AllocOptions{Node: 0, NoHuge: true}); m.From() != "host" {
			t.Errorf("%s: memory from %q", name, m.From())
		}
	}
}

// TestAllocSaysWhatToDo: an error names the backend and a way out.
func TestAllocSaysWhatToDo(t *testing.T) {
	leak.Check(t)
	plain, err := mem.New(mem.Config{})
	check(t, err)
	broken, none, b := newLandlord(t, "broken"), newLandlord(t, "none"), newLandlord(t, "own")
	broken.fault, none.fault = errors.New("no room in /dev/shm"), driver.ErrNotSupported
	e := open(t, "tenant", over(b, plain, broken, none))
	for _, c := range []struct {
		n    uint64
		o    AllocOptions
		is   error
		says string
	}{
		{1, AllocOptions{Backend: "ucx"}, ErrNotSupported, "own, mem, broken, none"},
		{1, AllocOptions{Backend: "mem"}, ErrNotSupported, "leave AllocOptions.Backend empty"},
		{1, AllocOptions{Backend: "none"}, ErrNotSupported, "leave AllocOptions.Backend empty"},
		{1, AllocOptions{Backend: "broken"}, broken.fault, "with broken: no room"},
		{1, AllocOptions{Node: 1}, ErrNotSupported, "use the package function Alloc"},
		{1, AllocOptions{Backend: "own", NoHuge: true}, ErrNotSupported,
			"use the package function Alloc"},
		{0, AllocOptions{}, ErrBounds, "with own"},
		{1 << 50, AllocOptions{}, ErrBounds, "with own"},
	} {
		m, err := e.Alloc(c.n, c.o)
		if m != nil || !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%d bytes, %+v: %v, want %v and %q", c.n, c.o, err, c.is, c.says)
		}
	}
	if _, err := Alloc(1, AllocOptions{Backend: "own"}); !errors.Is(err, ErrNotSupported) ||
		!strings.Contains(err.Error(), "Engine.Alloc") {
		t.Errorf("the package function with a backend: %v", err)
	}
	if n := b.leased.Load(); n != 0 {
		t.Errorf("failed calls kept %d bytes", n)
	}
	e2 := open(t, "other", over(newBroken(t)))
	if _, err := e2.Alloc(1, AllocOptions{}); err == nil {
		t.Error("the first backend failed, and other memory was given without a word")
	}
}

func newBroken(t testing.TB) *landlord {
	l := newLandlord(t, "broken")
	l.fault = errors.New("no room in /dev/shm")
	return l
}

func TestMemoryOfABackendIsCounted(t *testing.T) {
	leak.Check(t)
	e := open(t, "tenant", over(newLandlord(t, "own")))
	m := alloc(t, e, 8193, AllocOptions{Purpose: "counted"})
	if got := MemoryInUse()["counted"]; got != 3*4096 && got != 1<<16 {
		// pages of 4 KiB or of 64 KiB
		t.Errorf("%d bytes in use", got)
	}
	for range 2 {
		check(t, m.Close())
	}
	if got, ok := MemoryInUse()["counted"]; ok {
		t.Errorf("%d bytes in use after Close", got)
	}
	seg := m.Segment()
	if m.Bytes() != nil || seg.Check() == nil {
		t.Error("closed memory still shows bytes")
	}
}

// TestMemoryOfABackendMoves registers it with all backends of both sides.
func TestMemoryOfABackendMoves(t *testing.T) {
	leak.Check(t)
	prefill := open(t, "prefill", over(newLandlord(t, "own")))
	decode := open(t, "decode", over(newLandlord(t, "own")))
	src, dst := register(t, prefill, "src", 100_000), register(t, decode, "dst", 100_000)
	fill(src.Bytes(), 5)
	p := connect(t, prefill, decode)
	tr := transfer(t, p, Write)
	check(t, tr.Add(src, 0, remote(t, p, "dst"), 0, 100_000))
	check(t, tr.Post())
	check(t, tr.Wait(within(t)))
	if !bytes.Equal(src.Bytes(), dst.Bytes()) {
		t.Error("the bytes differ")
	}
}

func TestMemoryOutlivesTheEngine(t *testing.T) {
	leak.Check(t)
	b := newLandlord(t, "own")
	e := open(t, "tenant", over(b))
	m := alloc(t, e, 4096, AllocOptions{})
	_, err := e.Register("r", m.Segment())
	check(t, err)
	fill(m.Bytes(), 9)
	check(t, e.Close())
	want := make([]byte, 4096)
	fill(want, 9)
	if !bytes.Equal(m.Bytes(), want) {
		t.Error("the bytes changed with the end of the engine")
	}
	for _, o := range []AllocOptions{{}, {Backend: "own"}} {
		if _, err := e.Alloc(1, o); !errors.Is(err, ErrClosed) {
			t.Errorf("Alloc of a closed engine: %v", err)
		}
	}
	check(t, m.Close())
	if n := b.leased.Load(); n != 0 {
		t.Errorf("%d bytes are still with the backend", n)
	}
}

// TestAllocPopulates looks at the page faults that are left for later.
func TestAllocPopulates(t *testing.T) {
	e := open(t, "tenant", over(newLandlord(t, "own")))
	const n, page = 32 << 20, 4096
	m := alloc(t, e, n, AllocOptions{Populate: true})
	before := faults(t)
	for i := 0; i < n; i += page {
		m.Bytes()[i] = 1
	}
	if f := faults(t) - before; f > n/page/8 {
		t.Errorf("%d page faults in %d bytes that should be there", f, n)
	}
	if _, err := e.Alloc(hostmem.Limits().Total+1, AllocOptions{Populate: true}); !errors.Is(err,
		ErrBounds) {
		t.Errorf("populate more than there is: %v", err)
	}
}

func faults(t testing.TB) int64 {
	t.Helper()
	var use unix.Rusage
	check(t, unix.Getrusage(unix.RUSAGE_SELF, &use))
	return use.Minflt
}

// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// limit bounds every wait, on the slowest of machines.
const limit = 30 * time.Second

// rig is a backend that is connected to itself.
type rig struct {
	t    *testing.T
	b    *Backend
	p    *peer
	tag  uint64
	seed uint64
}

func newRig(t *testing.T, cfg Config) *rig {
	t.Helper()
	if libcuda != nil {
		if _, err := openCard(0); err != nil { // the test's own, which stays
			t.Fatal(err)
		}
		if _, err := openCard(1); err != nil {
			t.Fatal(err)
		}
		testkit.CheckLeaks(t, libcuda.InUse)
	}
	b, err := New(cfg)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Errorf("close backend: %v", err)
		}
		if n := pins.bytes(); n != 0 {
			t.Errorf("%d bytes are pinned after Close", n)
		}
		// The kernel lists a thread for a moment after it has been joined.
		for end := time.Now().Add(limit); threads(t) != 0; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Errorf("%d threads of workers are left after Close", threads(t))
				break
			}
		}
	})
	if n := threads(t); n < len(b.devices)*(b.cfg.Streams+1) {
		t.Errorf("%d threads for %d devices of %d streams: the count of threads tells nothing", n,
			len(b.devices), b.cfg.Streams)
	}
	p, err := b.Connect(context.Background(), b.Addr())
	require.NoError(t, err)
	return &rig{t: t, b: b, p: p.(*peer)}
}

// threads counts those of workers in this process.
func threads(t *testing.T) (n int) {
	t.Helper()
	tasks, err := filepath.Glob("/proc/self/task/*/comm")
	if err != nil || len(tasks) == 0 {
		t.Fatalf("%d threads in /proc, %v", len(tasks), err)
	}
	for _, name := range tasks {
		if comm, err := os.ReadFile(name); err == nil && string(comm) == "sluice-cuda\n" {
			n++
		}
	}
	return n
}

// onStandIn skips what commands the stand-in on a card.
func onStandIn(t *testing.T) {
	t.Helper()
	if libcuda == nil {
		drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "cuda",
			Reason: "this test commands the stand-in", Fix: "unset SLUICE_LIBCUDA"})
	}
}

// place is registered memory, known under both keys.
type place struct {
	space *drivertest.Space
	m     *memory
	key   uint32 // as imported
}

// bytes looks into the memory.
func (p *place) bytes() drivertest.Bytes { return spaceBytes(p.space) }

func spaceBytes(s *drivertest.Space) drivertest.Bytes {
	if s.Bytes != nil {
		return s.Bytes
	}
	return hostBytes(s.Segment.Mem)
}

type hostBytes []byte

func (m hostBytes) ReadAt(p []byte, off int64) (int, error)  { return copy(p, m[off:]), nil }
func (m hostBytes) WriteAt(p []byte, off int64) (int, error) { return copy(m[off:], p), nil }

// memory makes, fills, registers and imports memory.
func (r *rig) memory(alloc drivertest.Allocator, n uint64) *place {
	r.t.Helper()
	p := r.local(alloc, n)
	p.key = r.imported(p.m)
	return p
}

// local makes, fills and registers memory.
func (r *rig) local(alloc drivertest.Allocator, n uint64) *place {
	r.t.Helper()
	s, err := alloc(n)
	require.NoError(r.t, err)
	r.t.Cleanup(func() {
		_ = r.b.Close() // before its memory goes
		if s.Free != nil {
			if err := s.Free(); err != nil {
				r.t.Errorf("free memory: %v", err)
			}
		}
	})
	p := &place{space: s}
	r.fill(p)
	p.m = r.register(s.Segment)
	return p
}

func (r *rig) register(seg driver.Segment) *memory {
	r.t.Helper()
	seg.Secret = [16]byte{1, 2, 3}
	m, err := r.b.Register(seg)
	require.NoError(r.t, err)
	return m.(*memory)
}

func (r *rig) imported(m *memory) uint32 {
	r.t.Helper()
	token, err := m.AppendToken(nil)
	require.NoError(r.t, err)
	key, _, err := r.p.Import(token)
	require.NoError(r.t, err)
	return key
}

// fill writes bytes that no other place has.
func (r *rig) fill(p *place) {
	r.t.Helper()
	if p.space.Bytes == (nothing{}) {
		return
	}
	r.seed++
	mem := make([]byte, p.space.Segment.Len)
	_, _ = rand.NewChaCha8([32]byte{byte(r.seed), 7}).Read(mem) // never fails
	if _, err := p.bytes().WriteAt(mem, 0); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) content(p *place) []byte {
	r.t.Helper()
	mem := make([]byte, p.space.Segment.Len)
	if _, err := p.bytes().ReadAt(mem, 0); err != nil {
		r.t.Fatal(err)
	}
	return mem
}

func (r *rig) same(what string, got, want []byte) {
	r.t.Helper()
	if !bytes.Equal(got, want) {
		at := 0
		for got[at] == want[at] {
			at++
		}
		r.t.Fatalf("%s: bytes differ from %d of %d on", what, at, len(want))
	}
}

// submit starts a batch of one descriptor.
func (r *rig) submit(op driver.Op, l, remote *place, d driver.Desc) uint64 {
	r.t.Helper()
	r.tag++
	d.LocalKey, d.RemoteKey = l.m.key, remote.key
	require.NoError(r.t,
		r.p.Submit(r.tag, &driver.Batch{Op: op, Descs: []driver.Desc{d}}), "submit")
	return r.tag
}

// end polls until the tag is done, which no other may be before.
func (r *rig) end(tag uint64) error {
	r.t.Helper()
	for deadline := time.Now().Add(limit); ; time.Sleep(50 * time.Microsecond) {
		var done [1]driver.Completion
		n, err := r.b.Poll(done[:])
		switch {
		case err != nil:
			r.t.Fatal(err)
		case n == 1 && done[0].Tag != tag:
			r.t.Fatalf("tag %d ended (%v), want %d", done[0].Tag, done[0].Err, tag)
		case n == 1:
			return done[0].Err
		case time.Now().After(deadline):
			r.t.Fatalf("tag %d does not end", tag)
		}
	}
}

// move runs a batch to its end, which must be good.
func (r *rig) move(op driver.Op, l, remote *place, d driver.Desc) {
	r.t.Helper()
	if err := r.end(r.submit(op, l, remote, d)); err != nil {
		r.t.Fatalf("%v: %v", op, err)
	}
}

// alone runs the rest of a test in a process of its own, with another stand-in, and reports
// whether this is the one.
func alone(t *testing.T, flags string) bool {
	t.Helper()
	onStandIn(t)
	const variable = "SLUICE_TEST_ALONE"
	if os.Getenv(variable) == t.Name() {
		return true
	}
	cmd := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), variable+"="+t.Name(), flagsVariable+"="+flags)
	out, err := cmd.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("--- PASS: "+t.Name())) {
		t.Errorf("%v\n%s", err, out)
	}
	return false
}

func sameError(t *testing.T, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: %v, want %v", what, err, want)
	}
}

// sparse is memory whose pages nobody has touched, and which fill leaves alone.
func sparse(n uint64) (*drivertest.Space, error) {
	s, err := drivertest.ForeignMemory(n)
	if err == nil {
		s.Bytes = nothing{}
	}
	return s, err
}

// hbmUntouched is device memory of that sort.
func hbmUntouched(n uint64) (*drivertest.Space, error) {
	d, err := openCard(0)
	if err != nil {
		return nil, err
	}
	at, err := d.Alloc(n)
	seg := driver.Segment{Kind: driver.HBM, Len: n, Addr: at}
	return &drivertest.Space{Segment: seg, Bytes: nothing{}, Free: func() error {
		return d.Free(at)
	}}, err
}

// nothing keeps what is written to itself.
type nothing struct{}

func (nothing) ReadAt(p []byte, _ int64) (int, error)  { return len(p), nil }
func (nothing) WriteAt(p []byte, _ int64) (int, error) { return len(p), nil }

// bytes counts what is pinned by us.
func (t *pinTable) bytes() (n uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range t.list {
		if p.ours {
			n += uint64(len(p.mem))
		}
	}
	return n
}

// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package gds

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// limit bounds every wait of a test.
const limit = 20 * time.Second

// rig is a backend with memory of a device and a file, connected to itself.
type rig struct {
	t     testing.TB
	b     *Backend
	p     driver.Peer
	dev   *drivertest.Space
	f     *os.File
	l, m  driver.Memory
	local uint32
	far   uint32
}

// newRig makes them of that many bytes each; the file is as full of bytes as the memory is of
// zeros.
func newRig(t testing.TB, cfg Config, bytes uint64) *rig {
	t.Helper()
	cfg.CUDA, cfg.Library = testConfig().CUDA, testConfig().Library
	b, err := New(cfg)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	r := &rig{t: t, b: b}
	r.dev, err = hbm(bytes)
	require.NoError(t, err)
	r.f, err = os.Create(filepath.Join(t.TempDir(), "file"))
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
		_, _ = r.f.Close(), r.dev.Free()
	})
	if _, err := r.f.Write(pattern(bytes, 3)); err != nil {
		t.Fatal(err)
	}
	r.l, err = b.Register(r.dev.Segment)
	require.NoError(t, err)
	r.m, err = b.Register(driver.Segment{Kind: driver.File, Len: bytes,
		FD: int(r.f.Fd())})
	require.NoError(t, err)
	r.p, err = b.Connect(context.Background(), b.Addr())
	require.NoError(t, err)
	r.local, r.far = r.l.Key(), r.imported()
	return r
}

func (r *rig) imported() uint32 {
	r.t.Helper()
	token, err := r.m.AppendToken(nil)
	require.NoError(r.t, err)
	key, _, err := r.p.Import(token)
	require.NoError(r.t, err)
	return key
}

// pattern is bytes that are nobody else's.
func pattern(n uint64, seed byte) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(i>>8)*31 ^ byte(i)*7 ^ seed
	}
	return p
}

func (r *rig) submit(op driver.Op, tag uint64, descs ...driver.Desc) {
	r.t.Helper()
	for i := range descs {
		descs[i].LocalKey, descs[i].RemoteKey = r.local, r.far
	}
	require.NoError(r.t, r.p.Submit(tag, &driver.Batch{Op: op, Descs: descs}))
}

// move runs a batch and returns its outcome.
func (r *rig) move(op driver.Op, descs ...driver.Desc) error {
	r.t.Helper()
	r.submit(op, 7, descs...)
	return r.outcome(7)
}

// outcome waits for the only tag under way.
func (r *rig) outcome(tag uint64) error {
	r.t.Helper()
	var done [4]driver.Completion
	for end := time.Now().Add(limit); ; time.Sleep(50 * time.Microsecond) {
		k, err := r.b.Poll(done[:])
		switch {
		case err != nil:
			r.t.Fatalf("poll: %v", err)
		case k == 1 && done[0].Tag == tag:
			return done[0].Err
		case k > 0:
			r.t.Fatalf("%d completions, the first %+v", k, done[0])
		case time.Now().After(end):
			r.t.Fatal("no completion")
		}
	}
}

// none wants nothing to complete.
func (r *rig) none() {
	r.t.Helper()
	var done [4]driver.Completion
	if k, err := r.b.Poll(done[:]); k != 0 || err != nil {
		r.t.Fatalf("%d completions, the first %+v, and %v", k, done[0], err)
	}
}

// memory is what the device has.
func (r *rig) memory() []byte {
	r.t.Helper()
	mem := make([]byte, r.dev.Segment.Len)
	if _, err := r.dev.Bytes.ReadAt(mem, 0); err != nil {
		r.t.Fatal(err)
	}
	return mem
}

// content is what the file has.
func (r *rig) content() []byte {
	r.t.Helper()
	text, err := os.ReadFile(r.f.Name())
	require.NoError(r.t, err)
	return text
}

func (r *rig) same(what string, got, want []byte) {
	r.t.Helper()
	if !bytes.Equal(got, want) {
		r.t.Errorf("%s: other bytes than those that were to come", what)
	}
}

// until waits for a condition.
func (r *rig) until(what string, met func() bool) {
	r.t.Helper()
	for end := time.Now().Add(limit); !met(); time.Sleep(50 * time.Microsecond) {
		if time.Now().After(end) {
			r.t.Fatalf("%s: not within %v", what, limit)
		}
	}
}

// eachWay runs a test over each way to hand requests over.
func eachWay(t *testing.T, run func(t *testing.T, cfg Config)) {
	for _, way := range []Way{WayBatch, WayThreads} {
		t.Run(way.String(), func(t *testing.T) { run(t, Config{Way: way, Threads: 2}) })
	}
}

// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"bytes"
	"context"
	"crypto/rand"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// patience bounds every wait of these tests.
const patience = 20 * time.Second

const us, ms = time.Microsecond, time.Millisecond

func check(t testing.TB, err error) {
	t.Helper()
	require.NoError(t, err)
}

func connect(t testing.TB, from, to driver.Backend) driver.Peer {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	p, err := from.Connect(ctx, to.Addr())
	check(t, err)
	return p
}

// rig is mem under rules, connected to mem without.
type rig struct {
	testing.TB
	near, far     driver.Backend
	peer          driver.Peer
	local, remote driver.Memory
	from, to      []byte
	key           uint32 // of remote
	tags          uint64
	done          map[uint64][]error
}

func newRig(t testing.TB, rules ...Rule) *rig { t.Helper(); return newRigOf(t, 0, rules...) }

func newRigOf(t testing.TB, seed uint64, rules ...Rule) *rig {
	t.Helper()
	testkit.CheckLeaks(t)
	inner, err := openMem()
	check(t, err)
	near, err := Wrap(inner, seed, rules...)
	check(t, err)
	far, err := openMem()
	check(t, err)
	r := &rig{TB: t, near: near, far: far, done: map[uint64][]error{}}
	t.Cleanup(func() {
		check(t, near.Close())
		check(t, far.Close())
	})
	r.from, r.to = make([]byte, 1<<20), make([]byte, 1<<20)
	_, _ = rand.Read(r.from)
	r.local, r.remote = register(t, near, r.from), register(t, far, r.to)
	r.dial()
	return r
}

func register(t testing.TB, b driver.Backend, mem []byte) driver.Memory {
	t.Helper()
	seg := driver.Segment{Kind: driver.DRAM, Len: uint64(len(mem)), Mem: mem}
	_, _ = rand.Read(seg.Secret[:])
	m, err := b.Register(seg)
	check(t, err)
	return m
}

// dial connects, and imports what there is.
func (r *rig) dial() {
	r.Helper()
	r.peer = connect(r, r.near, r.far)
	r.imports()
}

func (r *rig) imports() {
	r.Helper()
	token, err := r.remote.AppendToken(nil)
	check(r, err)
	r.key, _, err = r.peer.Import(token)
	check(r, err)
}

func (r *rig) desc(off, n uint64) []driver.Desc {
	return []driver.Desc{{Local: off, Remote: off, Len: n, LocalKey: r.local.Key(),
		RemoteKey: r.key}}
}

// write submits a write and returns its tag.
func (r *rig) write(off, n uint64) uint64 {
	r.Helper()
	r.tags++
	check(r, r.submit(off, n))
	return r.tags
}

// submit submits a write under the last tag.
func (r *rig) submit(off, n uint64) error {
	return r.peer.Submit(r.tags, &driver.Batch{Op: driver.Write, Descs: r.desc(off, n)})
}

// poll notes what is complete.
func (r *rig) poll() {
	r.Helper()
	var done [16]driver.Completion
	for {
		n, err := r.near.Poll(done[:])
		for _, c := range done[:n] {
			r.done[c.Tag] = append(r.done[c.Tag], c.Err)
		}
		if n == 0 || err != nil {
			return
		}
	}
}

// await returns the outcome of a tag.
func (r *rig) await(tag uint64) error {
	r.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(50 * time.Microsecond) {
		if r.poll(); len(r.done[tag]) > 0 {
			return r.done[tag][0]
		}
	}
	r.Fatalf("tag %d is not complete after %v", tag, patience)
	return nil
}

// silent fails if a tag completes within a while.
func (r *rig) silent(tag uint64) {
	r.Helper()
	for end := time.Now().Add(20 * time.Millisecond); time.Now().Before(end); time.Sleep(
		time.Millisecond) {
		if r.poll(); len(r.done[tag]) > 0 {
			r.Fatalf("tag %d ended with %v", tag, r.done[tag])
		}
	}
}

// once fails unless each tag so far completed exactly once.
func (r *rig) once() {
	r.Helper()
	r.poll()
	for tag := uint64(1); tag <= r.tags; tag++ {
		if len(r.done[tag]) != 1 {
			r.Errorf("tag %d completed with %v, want one outcome", tag, r.done[tag])
		}
	}
}

func (r *rig) landed(off, n uint64) bool { return bytes.Equal(r.to[off:off+n], r.from[off:off+n]) }

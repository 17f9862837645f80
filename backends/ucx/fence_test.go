// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/keys"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// pair is two backends over the fake fabric, one connected to the other.
type pair struct {
	near, far *Backend
	peer      *peer
}

func openPair(t *testing.T, cfg Config) pair {
	t.Helper()
	leak.Check(t)
	p := pair{openFakeBackend(t, cfg), openFakeBackend(t, cfg), nil}
	p.peer = p.connect(t)
	return p
}

// openFakeBackend opens a backend over the fake fabric. Where a test says no Grace, a peer has as
// long as a busy machine needs to answer before it is taken for silent, and reached the other way.
func openFakeBackend(t *testing.T, cfg Config) *Backend {
	t.Helper()
	if cfg.Grace == 0 {
		cfg.Grace = graceMax
	}
	b, err := newFake(cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Errorf("close backend: %v", err)
		}
	})
	return b
}

func (p *pair) connect(t *testing.T) *peer {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := p.near.Connect(ctx, p.far.Addr())
	require.NoError(t, err)
	return c.(*peer)
}

// fakeOf is the fake of a backend's near context.
func fakeOf(b *Backend) *fakeNet { return b.near.net.(*fakeNet) }

// share registers memory and imports it.
func (p *pair) share(t *testing.T) (*memory, uint32) {
	t.Helper()
	m, err := p.far.Register(driver.Segment{Kind: driver.DRAM, Len: 4096, Mem: make([]byte, 4096),
		Secret: [16]byte{1}})
	require.NoError(t, err)
	return m.(*memory), p.imports(t, m)
}

func (p *pair) imports(t *testing.T, m driver.Memory) uint32 {
	t.Helper()
	token, err := m.AppendToken(nil)
	require.NoError(t, err)
	key, size, err := p.peer.Import(token)
	if err != nil || size != 4096 {
		t.Fatalf("import: %d bytes, %v", size, err)
	}
	return key
}

// TestFenceOfUntold costs nothing where no peer could know of the memory.
func TestFenceOfUntold(t *testing.T) {
	p := openPair(t, Config{})
	m, _ := p.share(t)
	for round := range int64(3) {
		for range 5 {
			require.NoError(t, p.far.Fence(t.Context(), m.Key()))
		}
		if got := fakeOf(p.far).fences.Load(); got != round+1 {
			t.Errorf("round %d: %d fences of UCX, want one for each import", round, got)
		}
		p.imports(t, m)
	}
}

// TestFenceStuck has a near peer that does not answer.
func TestFenceStuck(t *testing.T) {
	p := openPair(t, Config{FenceGrace: graceMax})
	m, _ := p.share(t)
	fake := fakeOf(p.far)
	fake.stuck.Store(true)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := p.far.Fence(ctx, m.Key()); !errors.Is(err, context.DeadlineExceeded) ||
		!errors.Is(err, driver.ErrTimeout) {
		t.Errorf("fence with a short context: %v", err)
	}
	if fake.memory(m.Key()).fresh {
		t.Error("fresh pages before the grace was over")
	}
	p.far.cfg.FenceGrace = 50 * time.Millisecond
	begin := time.Now()
	if err := p.far.Fence(t.Context(), m.Key()); err != nil {
		t.Errorf("fence against a silent peer: %v", err)
	}
	if took := time.Since(begin); took < p.far.cfg.FenceGrace || !fake.memory(m.Key()).fresh {
		t.Errorf("after %v: fresh pages %v", took, fake.memory(m.Key()).fresh)
	}
	calls := fake.fences.Load()
	if err := p.far.Fence(t.Context(), m.Key()); err != nil || fake.fences.Load() != calls {
		t.Errorf("fence after the strong means: %v, %d calls", err, fake.fences.Load()-calls)
	}
}

// TestCloseBehindACloseThatFailed: a memory whose Close had no proof is the backend's to prove.
func TestCloseBehindACloseThatFailed(t *testing.T) {
	leak.Check(t)
	far, err := newFake(Config{Grace: graceMax, FenceGrace: 50 * time.Millisecond})
	require.NoError(t, err)
	p := pair{near: openFakeBackend(t, Config{}), far: far}
	p.peer = p.connect(t)
	seg, _, err := far.Alloc(4096)
	require.NoError(t, err)
	release, err := seg.Shared.(driver.Holder).Hold() // fresh pages cannot come under it
	require.NoError(t, err)
	defer release()
	m, err := far.Register(seg)
	require.NoError(t, err)
	p.imports(t, m)
	fakeOf(far).stuck.Store(true)
	require.ErrorIs(t, m.Close(), driver.ErrBusy)
	require.ErrorIs(t, far.Fence(t.Context(), m.Key()), driver.ErrBounds, "it is unknown")
	require.ErrorIs(t, far.Close(), driver.ErrBusy)
	require.ErrorIs(t, m.Close(), driver.ErrBusy)
}

// TestReusedKey shows the token of memory that is gone for that which has its key.
func TestReusedKey(t *testing.T) {
	p := openPair(t, Config{KeysMax: 1})
	m, _ := p.share(t)
	old, err := m.AppendToken(nil)
	require.NoError(t, err)
	require.NoError(t, m.Close())
	next, _ := p.share(t)
	if next.Key() != m.Key() {
		t.Fatalf("key %d, want %d again", next.Key(), m.Key())
	}
	if _, _, err := p.peer.Import(old); !errors.Is(err, driver.ErrRevoked) {
		t.Errorf("import of the old token: %v", err)
	}
	forged := keys.Token{Secret: [16]byte{9}, Key: next.key, Epoch: next.epoch, Size: 4096}
	if _, _, err := p.peer.Import(forged.Append(nil, &p.far.address.owner)); !errors.Is(err,
		driver.ErrBadToken) {
		t.Errorf("import with another secret: %v", err)
	}
	forged.Epoch++
	if _, _, err := p.peer.Import(forged.Append(nil, &p.far.address.owner)); !errors.Is(err,
		driver.ErrBadToken) {
		t.Errorf("import of an epoch to come: %v", err)
	}
}

func TestAllocations(t *testing.T) {
	b := openFakeBackend(t, Config{})
	seg, owner, err := b.Alloc(3 * 4096)
	require.NoError(t, err)
	other, otherOwner, err := b.Alloc(4096)
	require.NoError(t, err)
	store := owner.(*allocation).store.(*fakeStorage)
	for what, c := range map[string]struct {
		mem  []byte
		want bool
	}{
		"all": {seg.Mem, true}, "the middle": {seg.Mem[5000:6000], true},
		"the last byte": {seg.Mem[3*4096-1:], true},
		"another":       {other.Mem, true}, "foreign": {make([]byte, 10), false},
	} {
		a := b.allocations.use(c.mem)
		if (a != nil) != c.want {
			t.Errorf("%s: found %v", what, a)
		}
		b.allocations.unuse(a)
	}
	m, err := b.Register(seg)
	require.NoError(t, err)
	for range 2 {
		if err := owner.Close(); err != nil || store.closed != 0 {
			t.Errorf("close under a registration: %v, closed %d times", err, store.closed)
		}
	}
	if err := m.Close(); err != nil || store.closed != 1 {
		t.Errorf("close the registration: %v, memory closed %d times", err, store.closed)
	}
	if err := otherOwner.Close(); err != nil || len(b.allocations.list) != 0 {
		t.Errorf("%v, %d allocations are left", err, len(b.allocations.list))
	}
	far := openFakeBackend(t, Config{Transports: "tcp"})
	if _, _, err := far.Alloc(1); !errors.Is(err, driver.ErrNotSupported) {
		t.Errorf("memory without near transports: %v", err)
	}
}

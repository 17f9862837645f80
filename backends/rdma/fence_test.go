// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// TestFenceOfUntold costs nothing where no peer could know of the memory.
func TestFenceOfUntold(t *testing.T) {
	p := openPair(t, Config{})
	m := register(t, p.far, 4096)
	for round := range 3 {
		for range 5 {
			require.NoError(t, p.far.Fence(t.Context(), m.Key()))
		}
		if got := fakeOf(p.far).revokes; got != round {
			t.Errorf("round %d: %d keys revoked, want one for each epoch with an import", round,
				got)
		}
		p.imports(t, m)
		p.imports(t, m)
	}
}

// TestConnectionsForgetMemory has a peer import memory after memory, as leases of requests do: the
// connection keeps no memory that the owner has closed.
func TestConnectionsForgetMemory(t *testing.T) {
	p := openPair(t, Config{})
	for range 20 {
		m := register(t, p.far, 4096)
		key := p.imports(t, m)
		p.peer.Drop(key)
		require.NoError(t, m.Close())
	}
	p.far.mu.Lock()
	defer p.far.mu.Unlock()
	require.Len(t, p.far.accepted, 1)
	for c := range p.far.accepted {
		c.knowing.Lock()
		require.Empty(t, c.knows)
		c.knowing.Unlock()
	}
}

// TestFenceTells has a peer that knows the key stop by itself: no queue pair fails.
func TestFenceTells(t *testing.T) {
	p := openPair(t, Config{})
	l, r := register(t, p.near, 100), register(t, p.far, 100)
	key := p.imports(t, r)
	require.NoError(t, p.far.Fence(t.Context(), r.Key()))
	d := writeOf(driver.Desc{Len: 100, LocalKey: l.key, RemoteKey: key})
	eventually(t, "the news that the epoch is over", func() bool {
		p.tag++
		err := p.peer.Submit(p.tag, d)
		if err == nil {
			err = p.await(t, p.tag)
		}
		if !errors.Is(err, driver.ErrRevoked) {
			t.Fatalf("a write with a key of a past epoch: %v", err)
		}
		return p.peer.Submit(1000, d) != nil
	})
	if err := p.await(t, p.write(t, l, p.imports(t, r), nil)); err != nil {
		t.Errorf("with the next epoch: %v", err)
	}
}

// TestFenceStuck has a NIC that does not let go of a key until the queue pairs that use it
// are gone; the connection bears it.
func TestFenceStuck(t *testing.T) {
	p := openPair(t, Config{})
	l, r := register(t, p.near, 1<<20), register(t, p.far, 1<<20)
	p.imports(t, r)
	fake := fakeOf(p.far)
	used := fake.pairs()
	fake.mu.Lock()
	fake.inUse = used
	fake.mu.Unlock()
	if err := p.far.Fence(t.Context(), r.Key()); len(used) != 2 || err != nil {
		t.Errorf("fence of a key in use by %d queue pairs: %v", len(used), err)
	}
	if err := p.await(t, p.write(t, l, p.imports(t, r), nil)); err != nil {
		t.Errorf("a write after queue pairs were ended for a fence: %v", err)
	}
	fake.mu.Lock()
	fake.stuck = 4
	fake.mu.Unlock()
	if err := p.far.Fence(t.Context(), r.Key()); !errors.Is(err, errStuck) {
		t.Errorf("a fence without proof: %v", err)
	}
	if err := r.Close(); !errors.Is(err, errStuck) {
		t.Errorf("close memory without proof: %v", err)
	}
	if _, err := r.AppendToken(nil); !errors.Is(err, driver.ErrClosed) {
		t.Errorf("token of memory that could not be closed: %v", err)
	}
	if err := r.Close(); err != nil {
		t.Errorf("close memory again: %v", err)
	}
	if fake.memory(r.Key()) != nil {
		t.Error("the memory is still known")
	}
}

// TestCloseStuck has a NIC keep memory that it was told to forget: closing it again does it,
// and its key is not used for other memory until then.
func TestCloseStuck(t *testing.T) {
	p := openPair(t, Config{KeysMax: 1})
	m, fake := register(t, p.far, 4096), fakeOf(p.far)
	fake.mu.Lock()
	fake.stuckMaps = 1
	fake.mu.Unlock()
	require.ErrorIs(t, m.Close(), errStuck)
	_, err := p.far.Register(driver.Segment{Kind: driver.DRAM, Len: 1, Mem: make([]byte, 1)})
	require.ErrorIs(t, err, driver.ErrFull)
	require.NoError(t, m.Close())
	register(t, p.far, 4096)
}

// TestCloseBehindACloseThatFailed: the backend's Close looks for the proof that the memory's had
// not, and says so where there is none.
func TestCloseBehindACloseThatFailed(t *testing.T) {
	leak.Check(t)
	for stuck, want := range map[int]error{1: nil, 2: errStuck} {
		far, err := newFake(Config{})
		require.NoError(t, err)
		m, fake := register(t, far, 4096), fakeOf(far)
		fake.mu.Lock()
		fake.stuckMaps = stuck
		fake.mu.Unlock()
		require.ErrorIs(t, m.Close(), errStuck)
		require.ErrorIs(t, far.Fence(t.Context(), m.Key()), driver.ErrBounds, "it is unknown")
		require.ErrorIs(t, far.Close(), want)
		require.ErrorIs(t, m.Close(), want)
	}
}

// TestFenceOwes has a fence fail: the key is given to no other peer until the proof that is owed
// has kept out the peer that knew it.
func TestFenceOwes(t *testing.T) {
	p := openPair(t, Config{})
	r, fake := register(t, p.far, 4096), fakeOf(p.far)
	p.imports(t, r)
	eventually(t, "the queue pairs", func() bool { return len(fake.pairs()) == 2 })
	used := fake.pairs()
	first, second := p.peer, p.connect(t)
	fake.mu.Lock()
	fake.stuck = 4
	fake.mu.Unlock()
	require.ErrorIs(t, p.far.Fence(t.Context(), r.Key()), errStuck)
	p.peer = second
	token, err := r.AppendToken(nil)
	require.NoError(t, err)
	_, _, err = second.Import(token)
	require.ErrorIs(t, err, driver.ErrFull)
	fake.mu.Lock()
	fake.inUse = used
	fake.mu.Unlock()
	p.imports(t, r)
	p.peer = first
	require.NoError(t, p.far.Fence(t.Context(), r.Key()))
}

// TestReusedKey shows the token of memory that is gone for that which has its key.
func TestReusedKey(t *testing.T) {
	p := openPair(t, Config{KeysMax: 1})
	m := register(t, p.far, 4096)
	p.imports(t, m)
	old, err := m.AppendToken(nil)
	require.NoError(t, err)
	require.NoError(t, m.Close())
	next := register(t, p.far, 4096)
	if next.Key() != m.Key() {
		t.Fatalf("key %d, want %d again", next.Key(), m.Key())
	}
	if _, _, err := p.peer.Import(old); !errors.Is(err, driver.ErrRevoked) {
		t.Errorf("import of the old token: %v", err)
	}
	forged := session.Token{Secret: [16]byte{9}, Key: next.key, Epoch: next.epoch, Size: 4096}
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

// TestFenceWithoutTime has a context that is over: the epoch ends all the same, and the next
// call brings the proof.
func TestFenceWithoutTime(t *testing.T) {
	p := openPair(t, Config{})
	l, r := register(t, p.near, 100), register(t, p.far, 100)
	key := p.imports(t, r)
	old, err := r.AppendToken(nil)
	require.NoError(t, err)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	fake := fakeOf(p.far)
	fake.mu.Lock()
	fake.stuck = 1
	fake.mu.Unlock()
	require.ErrorIs(t, p.far.Fence(over, r.Key()), context.Canceled)
	_, _, err = p.peer.Import(old)
	require.ErrorIs(t, err, driver.ErrRevoked)
	eventually(t, "the news that the epoch is over", func() bool {
		err := p.peer.Submit(1000, writeOf(driver.Desc{Len: 100, LocalKey: l.key, RemoteKey: key}))
		return errors.Is(err, driver.ErrRevoked)
	})
	require.Equal(t, 1, fake.revokes, "no queue pair ends")
	require.NoError(t, p.far.Fence(over, r.Key()), "the proof needs no time")
	require.Equal(t, 2, fake.revokes)
	require.NoError(t, p.await(t, p.write(t, l, p.imports(t, r), nil)))
}

// TestFenceGivenUp has a fence run out of time before it could begin its proof. A peer that imports
// the memory in the next epoch keeps what it got: the proof that is owed comes first.
func TestFenceGivenUp(t *testing.T) {
	p := openPair(t, Config{})
	l, r := register(t, p.near, 100), register(t, p.far, 100)
	p.imports(t, r)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	r.fencing <- struct{}{} // another fence at work
	require.ErrorIs(t, p.far.Fence(over, r.Key()), context.Canceled)
	token, err := r.AppendToken(nil)
	require.NoError(t, err)
	var key uint32
	imported := make(chan error, 1)
	go func() {
		var err error
		key, _, err = p.peer.Import(token)
		imported <- err
	}()
	early := time.After(50 * time.Millisecond)
	select {
	case err = <-imported:
		t.Error("an import before the epochs before were proved to be over")
		<-r.fencing
	case <-early:
		<-r.fencing
		err = <-imported
	}
	require.NoError(t, err)
	eventually(t, "the proof that is owed", func() bool {
		fakeOf(p.far).mu.Lock()
		defer fakeOf(p.far).mu.Unlock()
		return fakeOf(p.far).revokes == 1
	})
	require.NoError(t, p.await(t, p.write(t, l, key, nil)))
	require.NoError(t, p.far.Fence(t.Context(), r.Key()))
	require.Equal(t, 2, fakeOf(p.far).revokes, "one for each epoch with an import")
}

// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

const heldBytes = 64 << 10

// heldUp has a write of heldBytes zeros stand in the kernel, behind the gate: the pages of its
// source do not come until they are supplied. ended waits for the write and returns its outcome.
func heldUp(t *testing.T, b *Backend, addr, token []byte) (
	source *testkit.WithheldMemory, ended func() error,
) {
	t.Helper()
	near, here := share(t, b, drivertest.ForeignMemory, heldBytes)
	source, err := testkit.WithholdPages(here)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	t.Cleanup(func() { source.Supply(t) }) // before Close, which waits for the write
	p := dial(t, b, addr)
	key, _ := take(t, p, token)
	submitted := make(chan error, 1)
	go func() {
		submitted <- p.Submit(1, &driver.Batch{Op: driver.Write, Descs: []driver.Desc{{
			Len: heldBytes, LocalKey: near.Key(), RemoteKey: key}}})
	}()
	source.Await(t)
	return source, func() error {
		require.NoError(t, <-submitted)
		return await(t, b, 1)
	}
}

// TestRevokeAgainInTheKernel: a Revoke that found no proof leaves the writer in the middle of its
// copy, and so the next one needs the same proof.
func TestRevokeAgainInTheKernel(t *testing.T) {
	owner, b := hasty(t), open(t, Config{})
	far, there := share(t, owner, drivertest.ForeignMemory, heldBytes)
	fill(there, 0x11)
	token, err := far.AppendToken(nil)
	require.NoError(t, err)
	source, ended := heldUp(t, b, owner.Addr(), token)
	for n := 0; n < 10 || len(owner.gate.old) == 0; n++ {
		require.ErrorIs(t, cutShort(t, far), driver.ErrTimeout)
	}
	require.Len(t, owner.gate.old, 1, "one for the writer, however often it is looked at")
	source.Supply(t)
	require.NoError(t, far.Revoke(t.Context()))
	after := bytes.Clone(there)
	require.NoError(t, ended())
	if !bytes.Equal(after, there) {
		testkit.FatalBroken(t, "bytes landed after Revoke")
	}
}

// TestBackendCloseInTheKernel: a backend that closes under a writer in the middle of its copy says
// that bytes may land yet.
func TestBackendCloseInTheKernel(t *testing.T) {
	owner, err := New(Config{})
	require.NoError(t, err)
	b := open(t, Config{})
	far, _ := share(t, owner, drivertest.ForeignMemory, heldBytes)
	token, err := far.AppendToken(nil)
	require.NoError(t, err)
	source, ended := heldUp(t, b, owner.Addr(), token)
	for range 2 {
		require.ErrorIs(t, owner.Close(), driver.ErrTimeout)
	}
	source.Supply(t)
	require.NoError(t, ended())
}

// TestRevokeAgainMapped is the same with memory that peers map, of which the owner can keep no
// writer out: its range shares a page with others.
func TestRevokeAgainMapped(t *testing.T) {
	owner, b := hasty(t), open(t, Config{})
	buf, err := hostmem.Alloc(4096, hostmem.Options{Purpose: "test", Huge: hostmem.HugeNone})
	require.NoError(t, err)
	t.Cleanup(func() { _ = owner.Close(); _ = buf.Close() })
	seg := buf.Segment()
	seg.Only = driver.Ranges{{Off: 8, Len: 64}}
	m, err := owner.Register(seg)
	require.NoError(t, err)
	far := m.(*memory)
	near, src := share(t, b, drivertest.ForeignMemory, 4096)
	fill(src, late)
	p := dial(t, b, owner.Addr())
	release := parkedMover(t, b, p, "shm: mapped", driver.Desc{Len: 64, Remote: 8,
		LocalKey: near.Key(), RemoteKey: importOf(t, p, far)})
	for range 3 {
		require.ErrorIs(t, far.Revoke(t.Context()), driver.ErrBusy)
	}
	require.NoError(t, release())
	require.NoError(t, far.Revoke(t.Context()))
}

// TestAnnouncementThatComesAgain: a peer numbers its announcements, and the numbers come again. One
// that Revoke gave up says nothing about a later one.
func TestAnnouncementThatComesAgain(t *testing.T) {
	b := hasty(t)
	shared, _ := share(t, b, drivertest.HostMemory, 4096)
	foreign, _ := share(t, b, drivertest.ForeignMemory, 4096)
	p := dial(t, open(t, Config{}), b.Addr())
	gate := b.table.gate()
	renewals := 0
	t.Cleanup(shared.arena.shared.OnRenew(func() func() bool { renewals++; return nil }))
	for _, m := range []*memory{shared, foreign} {
		revoke := func() {
			t.Helper()
			require.NoError(t, m.Revoke(t.Context()))
			m = again(t, m)
		}
		line := p.announce(m.Key(), driver.Write, 7)
		value := line.Load()
		revoke()
		line.Store(0)
		revoke()
		shut := gate.Load()
		line.Store(value)
		revoke()
		line.Store(0)
		require.Equal(t, m.arena == nil, gate.Load() != shut)
	}
	require.Equal(t, 2, renewals)
}

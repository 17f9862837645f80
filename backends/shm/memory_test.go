// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// Thousands of regions must fit in one description of 64 KiB.
func TestTokensAreShort(t *testing.T) {
	b := open(t, Config{KeysMax: 2049})
	m, _ := share(t, b, drivertest.HostMemory, 16<<20)
	longest := 0
	for i := range 2048 {
		seg := driver.Segment{Kind: driver.DRAM, Mem: m.bytes[i*4096:][:4096], Len: 4096,
			Shared: m.arena.shared, SharedOff: uint64(i) * 4096}
		r, err := b.Register(seg)
		require.NoError(t, err)
		token, err := r.AppendToken(nil)
		require.NoError(t, err)
		longest = max(longest, len(token))
	}
	if longest > 28 {
		t.Errorf("a token takes %d bytes, want at most 28", longest)
	}
	require.Len(t, b.arenas, 1, "of 2,049 ranges of one Shared")
	_, err := b.Register(driver.Segment{Kind: driver.DRAM, Mem: m.bytes[:4096], Len: 4096})
	require.ErrorIs(t, err, driver.ErrFull, "over KeysMax")
}

// A Shared whose pages moved by another hand is mapped anew, and descriptors
// that can shrink are never mapped.
func TestSharedIsMappedAnewAndChecked(t *testing.T) {
	owner, b := open(t, Config{}), open(t, Config{})
	far, farMem := share(t, owner, drivertest.HostMemory, 4<<20)
	near, mem := share(t, b, drivertest.HostMemory, 4<<20)
	p := dial(t, b, owner.Addr())
	token, _ := far.AppendToken(nil)
	key, _, err := p.Import(token)
	require.NoError(t, err)
	d := []driver.Desc{{Len: 4 << 20, LocalKey: near.Key(), RemoteKey: key}}
	for round := range byte(6) {
		fill(mem, round+1)
		if round%2 == 1 { // our own strong means, while an import is in use
			require.NoError(t, far.arena.shared.Renew(t.Context(), 1<<20, 2<<20))
		}
		n := uint64(1024)
		if round >= 2 {
			n = 4 << 20
		}
		d[0].Len = n
		require.NoError(t, p.Submit(uint64(round), &driver.Batch{Op: driver.Write, Descs: d}))
		require.NoError(t, await(t, b, uint64(round)), "round %d", round)
		if farMem[0] != round+1 || farMem[n-1] != round+1 || farMem[n/2] != round+1 {
			t.Fatalf("round %d: the bytes are not there", round)
		}
	}
	soft, err := owner.Register(driver.Segment{Kind: driver.DRAM, Mem: farMem[:4096], Len: 4096,
		Shared: softShared(t)})
	require.NoError(t, err)
	token, _ = soft.AppendToken(nil)
	_, _, err = p.Import(token)
	wantError(t, "import of memory whose descriptor can shrink", err, driver.ErrCorrupt)
}

// soft is a Shared of one page that could be cut under its peers.
type soft struct {
	driver.Shared
	fd int
}

func softShared(t *testing.T) *soft {
	t.Helper()
	fd, err := unix.MemfdCreate("soft", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	require.NoError(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	require.NoError(t, unix.Ftruncate(fd, 4096))
	return &soft{fd: fd}
}

func (s *soft) Lend(f func([]driver.Extent) error) error {
	return f([]driver.Extent{{Len: 4096, FD: s.fd}})
}
func (s *soft) OnRenew(func() func() bool) func() { return func() {} }

// unlent is memory whose descriptors its owner keeps, as UCX does.
type unlent struct {
	driver.Shared
	holds int
}

func (*unlent) Lend(func([]driver.Extent) error) error { return driver.ErrNotSupported }

func (u *unlent) Hold() (release func(), err error) {
	u.holds++
	return func() { u.holds-- }, nil
}

// TestMemoryThatIsNotLent: peers reach it by system calls, so its pages stay where they are for as
// long as it is registered.
func TestMemoryThatIsNotLent(t *testing.T) {
	b, err := New(Config{})
	require.NoError(t, err)
	defer b.Close()
	u := &unlent{}
	m, err := b.Register(driver.Segment{Kind: driver.DRAM, Len: 4096, Mem: make([]byte, 4096),
		Shared: u, Secret: [16]byte{1}})
	require.NoError(t, err)
	require.Nil(t, m.(*memory).arena)
	require.Equal(t, 1, u.holds)
	for range 2 {
		require.NoError(t, m.Revoke(t.Context()))
	}
	require.Zero(t, u.holds)
}

func TestAddress(t *testing.T) {
	a := newAddress("/run/a:b")
	require.NotZero(t, a.net)
	again, err := decodeAddress(a.encode())
	require.NoError(t, err)
	require.Equal(t, a, again)
	for text, want := range map[string]error{
		"shm4:1:0011223344556677:":    driver.ErrVersion,
		"shm6:1:0011223344556677:":    driver.ErrCorrupt,
		"shm6:1:-2:0011223344556677:": driver.ErrCorrupt,
		"shm6:1:2:0011:":              driver.ErrCorrupt,
	} {
		_, err := decodeAddress([]byte(text))
		require.ErrorIs(t, err, want, text)
	}
}

// TestUnreachedPeer: another network namespace and a directory that is not there are named,
// with the cure.
func TestUnreachedPeer(t *testing.T) {
	b := open(t, Config{})
	connect := func(a address) error {
		_, err := b.Connect(context.Background(), a.encode())
		return err
	}
	gone := newAddress("")
	require.ErrorIs(t, connect(gone), unix.ECONNREFUSED)
	require.NotContains(t, connect(gone).Error(), "namespace")
	gone.net++
	require.ErrorIs(t, connect(gone), unix.ECONNREFUSED)
	require.ErrorContains(t, connect(gone), fmt.Sprintf("the peer is in network namespace %d of "+
		"this host, and this process in %d: set SocketDir", gone.net, gone.net-1))
	gone.dir = t.TempDir()
	require.ErrorContains(t, connect(gone), "no socket of the peer in "+gone.dir)
}

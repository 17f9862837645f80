// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

func mustAlloc(t testing.TB, n uint64, o Options) *Buffer {
	t.Helper()
	b, err := Alloc(n, o)
	require.NoError(t, err, "Alloc(%d, %+v)", n, o)
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return b
}

// extentsOf returns what Lend lends; none of memory that is closed.
func extentsOf(b *Buffer) (list []driver.Extent) {
	_ = b.Lend(func(extents []driver.Extent) error { list = extents; return nil })
	return list
}

// renewalsOf counts what OnRenew tells from now on.
func renewalsOf(t testing.TB, b *Buffer) *atomic.Int64 {
	t.Helper()
	n := new(atomic.Int64)
	t.Cleanup(b.OnRenew(func() func() bool { n.Add(1); return nil }))
	return n
}

// peerView maps the extents a second time, as another process would.
func peerView(t testing.TB, b *Buffer) []byte {
	t.Helper()
	extents := extentsOf(b)
	end := extents[len(extents)-1]
	view, err := Reserve(end.Off+end.Len, HugeSize)
	require.NoError(t, err)
	t.Cleanup(func() { _ = Unmap(view) })
	at := uint64(0)
	for _, e := range extents {
		require.EqualValues(t, at, e.Off, "extents have a gap or an overlap at: %+v", extents)
		at += e.Len
		require.NoError(t, Place(view[e.Off:e.Off+e.Len], e.FD, e.FDOff))
	}
	return view
}

func TestAllocGivesAlignedZeroedMemory(t *testing.T) {
	for _, n := range []uint64{1, 4095, 4096, 4097, 1 << 20, 2<<20 + 1, 5 << 20} {
		for _, populate := range []bool{false, true} {
			b := mustAlloc(t, n, Options{Purpose: "test", Populate: populate})
			mem := b.Bytes()
			if uint64(len(mem)) != n || uint64(cap(mem)) != n {
				t.Fatalf("%d bytes asked: len %d, cap %d", n, len(mem), cap(mem))
			}
			if addr := address(mem); addr%HugeSize != 0 {
				t.Errorf("%d bytes lie at %#x, not at a multiple of 2 MiB", n, addr)
			}
			require.Zero(t, len(bytes.Trim(mem, "\x00")), "%d bytes are not zero", n)
			for i := range mem {
				mem[i] = byte(i)
			}
		}
	}
}

func TestSegmentNamesTheBuffer(t *testing.T) {
	b := mustAlloc(t, 8192, Options{})
	s := b.Segment()
	require.NoError(t, s.Check())
	if s.Kind != driver.DRAM || s.Shared != b || s.SharedOff != 0 || &s.Mem[0] != &b.Bytes()[0] {
		t.Fatalf("segment %+v does not name the buffer", s)
	}
}

func TestPeerCannotResizeTheMemory(t *testing.T) {
	b := mustAlloc(t, 4<<20, Options{})
	fd := extentsOf(b)[0].FD
	for _, size := range []int64{0, 2 << 20, 8 << 20} {
		require.EqualValues(t, unix.EPERM, unix.Ftruncate(fd, size), "truncate to %d",
			size)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS,
		unix.F_SEAL_FUTURE_WRITE); err != unix.EPERM {
		t.Errorf("add a seal: %v", err)
	}
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
	if err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("descriptor flags %#x, %v: want close-on-exec", flags, err)
	}
}

func TestInUseCountsWholePagesByPurpose(t *testing.T) {
	a := mustAlloc(t, 1, Options{Purpose: "counted"})
	b := mustAlloc(t, 4097, Options{Purpose: "counted"})
	c := mustAlloc(t, 1, Options{})
	if got := InUse(); got["counted"] != 3*basePage || got["unnamed"] != basePage {
		t.Fatalf("in use: %v", got)
	}
	for _, x := range []*Buffer{a, b, c, a} {
		require.NoError(t, x.Close())
	}
	if got := InUse(); got["counted"] != 0 || got["unnamed"] != 0 {
		t.Fatalf("in use after Close: %v", got)
	}
}

func TestClosedBufferAnswers(t *testing.T) {
	b := mustAlloc(t, 4096, Options{})
	for range 2 {
		require.NoError(t, b.Close())
	}
	if b.Bytes() != nil || len(extentsOf(b)) != 0 {
		t.Error("a closed buffer still shows memory")
	}
	require.ErrorIs(t, b.Renew(t.Context(), 0, 1), os.ErrClosed, "Renew")
	require.ErrorIs(t, b.Lend(func([]driver.Extent) error { return nil }), os.ErrClosed, "Lend")
	if s := b.Segment(); s.Check() == nil {
		t.Error("the segment of a closed buffer passes Check")
	}
}

// TestCloseThatFails has the kernel refuse to unmap: the memory is there, and is known, until a
// later Close has unmapped it.
func TestCloseThatFails(t *testing.T) {
	b := mustAlloc(t, 8192, Options{Purpose: "kept", Huge: HugeNone})
	whole := b.mem
	b.mem = whole[1:] // munmap takes whole pages alone
	require.ErrorIs(t, b.Close(), unix.EINVAL)
	b.mem = whole
	require.Len(t, b.Bytes(), 8192)
	require.EqualValues(t, 8192, InUse()["kept"])
	require.Len(t, extentsOf(b), 1)
	require.NoError(t, b.Close())
	require.Zero(t, InUse()["kept"])
}

func TestSizesThatCannotBeServed(t *testing.T) {
	m := Limits()
	sizes := []uint64{0, 1 << 63, ^uint64(0), addressMax + 1, m.Total + 1}
	for _, n := range sizes {
		b, err := Alloc(n, Options{})
		if b != nil || !errors.Is(err, driver.ErrBounds) {
			t.Errorf("Alloc(%d): %v, %v", n, b, err)
		}
	}
	if _, err := Alloc(m.Total-1, Options{Populate: true}); !errors.Is(err, driver.ErrBounds) {
		t.Errorf("populating all memory of the machine: %v", err)
	}
}

func TestNodes(t *testing.T) {
	m := Limits()
	if len(m.Nodes) > 0 {
		b := mustAlloc(t, 1<<20, Options{Node: m.Nodes[0] + 1, Populate: true})
		require.NoError(t, b.Renew(t.Context(), 0, 4096))
	}
	for _, node := range []int{nodesMax, nodesMax + 1, 1 << 40, -1} {
		if _, err := Alloc(4096, Options{Node: node}); !errors.Is(err, driver.ErrUnavailable) {
			t.Errorf("node %d: %v, want unavailable", node-1, err)
		}
	}
	if left := InUse(); len(left) > 1 {
		t.Errorf("failed allocations are counted: %v", left)
	}
}

// TestHugePagesAreMapped believes the kernel's own account of the mapping, not
// the outcome of madvise.
func TestHugePagesAreMapped(t *testing.T) {
	b := mustAlloc(t, 8<<20, Options{Purpose: "huge-check", Populate: true})
	if b.PageSize() != HugeSize {
		t.Logf("this kernel gathered no huge pages (shmem_enabled is %q)", Limits().ShmemHuge)
		return
	}
	smaps, err := os.ReadFile("/proc/self/smaps")
	require.NoError(t, err)
	_, mine, ok := strings.Cut(string(smaps), fmt.Sprintf("%x-", address(b.Bytes())))
	require.True(t, ok, "the mapping is not in smaps")
	if got := kibibytes(mine, "ShmemPmdMapped:") + kibibytes(mine, "Shared_Hugetlb:") +
		kibibytes(mine, "Private_Hugetlb:"); got != 8<<20 {
		t.Errorf("%d of %d bytes are mapped by huge pages", got, 8<<20)
	}
}

func TestReservedPagesAreNotWasted(t *testing.T) {
	for _, n := range []uint64{1, HugeSize / 2, HugeSize + 1} {
		b := mustAlloc(t, n, Options{})
		require.EqualValues(t, basePage, b.page, "%d bytes lie in reserved huge pages", n)
	}
}

func TestSmallPagesWhenAsked(t *testing.T) {
	b := mustAlloc(t, 4<<20, Options{Huge: HugeNone, Populate: true})
	require.EqualValues(t, basePage, b.PageSize(), "page size")
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// hbmFake notes the dma-bufs that it is given, and how long the file behind each is.
type hbmFake struct {
	fake
	bufs   []driver.DMABuf
	sizes  []int64
	refuse error
}

func (f *hbmFake) Caps() driver.Caps {
	c := f.fake.Caps()
	c.Pairs[driver.HBM] = driver.KindsOf(driver.HBM)
	return c
}

func (f *hbmFake) Register(seg driver.Segment) (driver.Memory, error) {
	var st unix.Stat_t
	if err := unix.Fstat(seg.DMABuf.FD, &st); err != nil {
		return nil, err
	}
	f.bufs, f.sizes = append(f.bufs, *seg.DMABuf), append(f.sizes, st.Size)
	return fakeMemory{&f.fake}, f.refuse
}

// memoryFile stands for a dma-buf.
func memoryFile(t *testing.T, n int64) int {
	t.Helper()
	fd, err := unix.MemfdCreate("dma-buf", unix.MFD_CLOEXEC)
	check(t, err)
	check(t, unix.Ftruncate(fd, n))
	return fd
}

// TestDMABufOfARegion closes the program's descriptor as soon as it may, and leases later.
func TestDMABufOfARegion(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	f := &hbmFake{}
	e := open(t, "e", func(c *Config) { c.Backends = []driver.Backend{f} })
	fd := memoryFile(t, 1<<20)
	seg := driver.Segment{Kind: driver.HBM, Addr: 1 << 40, Len: 1 << 16,
		DMABuf: &driver.DMABuf{FD: fd, Offset: 8192}}
	r, err := e.Register("hbm", seg)
	check(t, err)
	check(t, unix.Close(fd))
	other := memoryFile(t, 4096) // of the same number: a stale one would be found out
	defer unix.Close(other)
	l, err := r.Lease(4096, 4096, LeaseOptions{})
	check(t, err)
	if len(f.sizes) != 2 || f.sizes[0] != 1<<20 || f.sizes[1] != 1<<20 {
		t.Errorf("dma-bufs of %d bytes, want twice that of the region", f.sizes)
	}
	if f.bufs[0].FD == fd || f.bufs[0].Offset != 8192 || f.bufs[1].Offset != 8192+4096 {
		t.Errorf("dma-bufs %+v of descriptor %d", f.bufs, fd)
	}
	check(t, l.Revoke(within(t)))
	own := r.Segment().DMABuf
	check(t, r.Close())
	require.ErrorIs(t, second(hostmem.DupDMABuf(own)), unix.EBADF,
		"the region is closed, its descriptor is not")
	require.ErrorIs(t, second(r.registerPart(r.Segment())), ErrClosed,
		"a part of a region that is closed")
}

// TestDMABufOfNoRegion leaves no descriptor behind where nothing was registered.
func TestDMABufOfNoRegion(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	f := &hbmFake{refuse: driver.ErrNotSupported}
	e := open(t, "e", func(c *Config) { c.Backends = []driver.Backend{f} })
	fd := memoryFile(t, 1<<20)
	seg := driver.Segment{Kind: driver.HBM, Addr: 1 << 40, Len: 1 << 16,
		DMABuf: &driver.DMABuf{FD: fd}}
	if _, err := e.Register("hbm", seg); !errors.Is(err, ErrNotSupported) || len(f.bufs) != 1 {
		t.Errorf("%v, %d registrations", err, len(f.bufs))
	}
	require.ErrorIs(t, second(hostmem.DupDMABuf(&f.bufs[0])), unix.EBADF,
		"the engine keeps a descriptor")
	check(t, unix.Close(fd))
	require.ErrorIs(t, second(e.Register("hbm", seg)), ErrBounds, "a descriptor that is closed")
}

// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package rdma

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// card stands for device memory that was exported: a file that the stand-in takes for its
// dma-buf, at an address where nothing of this process is.
type card struct {
	fd   int
	addr uint64
	file []byte // all of it, as the test sees it
}

const cardName = "card of a test"

func newCard(t testing.TB, addr uint64, n int) *card {
	t.Helper()
	fd, err := unix.MemfdCreate(cardName, unix.MFD_CLOEXEC)
	if err == nil {
		err = unix.Ftruncate(fd, int64(n))
	}
	require.NoError(t, err)
	c := &card{fd: fd, addr: addr}
	c.file, err = unix.Mmap(fd, 0, n, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED)
	require.NoError(t, err)
	t.Cleanup(func() { _ = unix.Munmap(c.file) })
	return c
}

// segment is n bytes at an offset of it.
func (c *card) segment(off, n uint64) driver.Segment {
	return driver.Segment{Kind: driver.HBM, Addr: c.addr + off, Len: n, Secret: [16]byte{1},
		DMABuf: &driver.DMABuf{FD: c.fd, Offset: off}}
}

// close closes the program's descriptor.
func (c *card) close(t testing.TB) {
	t.Helper()
	require.NoError(t, unix.Close(c.fd))
}

// cardsOpen counts descriptors of cards in this process.
func cardsOpen(t testing.TB) (n int) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, e := range entries {
		if target, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil &&
			strings.Contains(target, cardName) {
			n++
		}
	}
	return n
}

func scribble(mem []byte, seed int) {
	for i := range mem {
		mem[i] = byte(i>>9 + i*7 + seed)
	}
}

// openHBM is two backends over the stand-in with two rails each, one connected to the other.
func openHBM(t *testing.T, open func(Config) (*Backend, error), cfg Config) *pair {
	t.Helper()
	p := &pair{outcomes: map[uint64]error{}}
	for i, b := range []**Backend{&p.near, &p.far} {
		cfg.Devices = fmt.Sprintf("fake%d,fake%d", 2*i, 2*i+1)
		var err error
		*b, err = open(cfg)
		require.NoError(t, err)
		t.Cleanup(func() {
			if err := (*b).Close(); err != nil {
				t.Errorf("close backend: %v", err)
			}
		})
	}
	p.peer = p.connect(t)
	return p
}

func registerHBM(t testing.TB, b *Backend, seg driver.Segment) *memory {
	t.Helper()
	m, err := b.Register(seg)
	require.NoError(t, err)
	return m.(*memory)
}

// move runs one descriptor to its end.
func (p *pair) move(t *testing.T, op driver.Op, d driver.Desc) error {
	t.Helper()
	p.tag++
	if err := p.peer.Submit(p.tag, &driver.Batch{Op: op, Descs: []driver.Desc{d}}); err != nil {
		return err
	}
	return p.await(t, p.tag)
}

// TestHBM moves bytes from card to card and back, over all rails, where the program has
// closed its descriptors, and revokes.
func TestHBM(t *testing.T) {
	f, open := standIn(t, 4)
	testkit.CheckLeaks(t, f.InUse)
	p := openHBM(t, open, Config{Timeout: 1 << 20})
	if pairs := p.near.Caps().Pairs; pairs[driver.HBM] != driver.KindsOf(driver.DRAM, driver.HBM) ||
		pairs[driver.DRAM] != pairs[driver.HBM] {
		t.Errorf("pairs %v", pairs)
	}
	const n, nearOff, farOff = 5 << 20, 8192 + 100, 4096 + 777
	near, far := newCard(t, 1<<45, 6<<20), newCard(t, 1<<46, 6<<20)
	scribble(near.file, 1)
	scribble(far.file, 2)
	l, r := registerHBM(t, p.near, near.segment(nearOff, n)),
		registerHBM(t, p.far, far.segment(farOff, n))
	near.close(t)
	far.close(t)
	if got := cardsOpen(t); got != 2 {
		t.Errorf("%d descriptors, want one for each memory", got)
	}
	key := p.imports(t, r)
	for _, d := range []driver.Desc{{Local: 1000, Remote: 50, Len: 8}, {Local: 17, Remote: 4099,
		Len: 4 << 20}} {
		d.LocalKey, d.RemoteKey = l.key, key
		want := bytes.Clone(far.file)
		copy(want[farOff+d.Remote:], near.file[nearOff+d.Local:][:d.Len])
		if err := p.move(t, driver.Write, d); err != nil || !bytes.Equal(far.file, want) {
			t.Fatalf("write of %d bytes: %v, the right ones: %v", d.Len, err,
				bytes.Equal(far.file, want))
		}
		scribble(far.file, 3)
		want = bytes.Clone(near.file)
		copy(want[nearOff+d.Local:], far.file[farOff+d.Remote:][:d.Len])
		if err := p.move(t, driver.Read, d); err != nil || !bytes.Equal(near.file, want) {
			t.Fatalf("read of %d bytes: %v, the right ones: %v", d.Len, err,
				bytes.Equal(near.file, want))
		}
	}
	for i := range 4 {
		require.NotZero(t, f.Device(i).Get("dmabufs"))
	}
	for i := range 2 {
		if c, err := p.near.net.Counters(i); err != nil || c.BytesOut < 1<<20 {
			t.Errorf("rail %d carried %d bytes of 4 MiB, %v", i, c.BytesOut, err)
		}
	}
	for _, m := range []*memory{l, r} {
		if err := m.Revoke(context.Background()); err != nil {
			t.Error(err)
		}
	}
	if got := cardsOpen(t); got != 0 {
		t.Errorf("%d descriptors are left", got)
	}
}

// TestHBMLeases registers parts of device memory: they are no registration more, until a
// peer imports, and then begin at their own offset.
func TestHBMLeases(t *testing.T) {
	f, open := standIn(t, 4)
	testkit.CheckLeaks(t, f.InUse)
	p := openHBM(t, open, Config{})
	far := newCard(t, 1<<46, 1<<20)
	whole := far.segment(4096, 512<<10)
	r := registerHBM(t, p.far, whole)
	far.close(t)
	if other, err := unix.MemfdCreate("another file", unix.MFD_CLOEXEC); err != nil ||
		other != far.fd {
		t.Fatalf("descriptor %d, want the number %d again, %v", other, far.fd, err)
	} else {
		defer unix.Close(other)
	}
	pinned := f.Device(2).Get("dmabufs")
	part, err := whole.Slice(10_001, 20_000, [16]byte{2})
	require.NoError(t, err)
	lease := registerHBM(t, p.far, part)
	if got := f.Device(2).Get("dmabufs"); got != pinned || cardsOpen(t) != 1 {
		t.Errorf("%d registrations for a part, %d descriptors", got-pinned, cardsOpen(t))
	}
	l := register(t, p.near, 20_000)
	scribble(l.bytes, 5)
	want := bytes.Clone(far.file)
	copy(want[4096+10_001:], l.bytes)
	if err := p.await(t, p.write(t, l, p.imports(t, lease), nil)); err != nil ||
		!bytes.Equal(far.file, want) {
		t.Errorf("%v, the right bytes: %v", err, bytes.Equal(far.file, want))
	}
	if err := r.Revoke(context.Background()); err != nil {
		t.Error(err)
	}
	if got := cardsOpen(t); got != 1 {
		t.Errorf("%d descriptors while a lease stands", got)
	}
	scribble(l.bytes, 6)
	copy(want[4096+10_001:], l.bytes)
	if err := p.await(t, p.write(t, l, p.imports(t, lease), nil)); err != nil ||
		!bytes.Equal(far.file, want) {
		t.Errorf("when the whole is gone: %v, the right bytes: %v", err,
			bytes.Equal(far.file, want))
	}
	if err := lease.Revoke(context.Background()); err != nil || cardsOpen(t) != 0 {
		t.Errorf("%v, %d descriptors are left", err, cardsOpen(t))
	}
}

// TestHBMLeavesRailsOut has one rail of each side that takes no dma-buf: the bytes go over
// what is left, and Explain says why.
func TestHBMLeavesRailsOut(t *testing.T) {
	f, open := standIn(t, 4)
	testkit.CheckLeaks(t, f.InUse)
	f.Device(1).Set("dmabuf_errno", uint32(syscall.EOPNOTSUPP))
	p := openHBM(t, open, Config{})
	near, far := newCard(t, 1<<45, 4<<20), newCard(t, 1<<46, 4<<20)
	scribble(near.file, 7)
	l, r := registerHBM(t, p.near, near.segment(0, 4<<20)),
		registerHBM(t, p.far, far.segment(0, 4<<20))
	near.close(t)
	far.close(t)
	key := p.imports(t, r)
	if err := p.await(t, p.write(t, l, key, nil)); err != nil || !bytes.Equal(near.file, far.file) {
		t.Fatalf("%v, the right bytes: %v", err, bytes.Equal(near.file, far.file))
	}
	for i, want := range []uint64{4 << 20, 0} {
		if c, err := p.near.net.Counters(i); err != nil || c.BytesOut != want {
			t.Errorf("rail %d carried %d bytes, want %d, %v", i, c.BytesOut, want, err)
		}
	}
	const why = "not for this memory: its driver, or libibverbs, takes no dma-buf, and " +
		"nvidia_peermem is not loaded"
	if text := p.peer.Explain(l.key, key); strings.Count(text, why) != 1 ||
		strings.Index(text, why) < strings.Index(text, "fake1:1") {
		t.Errorf("explained as %s", text)
	}
	host := register(t, p.near, 100)
	if text := p.peer.Explain(host.key, key); strings.Contains(text, "not for this memory") {
		t.Errorf("host memory is explained as %s", text)
	}
}

// TestHBMWithoutMeans has no rail that could: the error says what would mend it.
func TestHBMWithoutMeans(t *testing.T) {
	f, open := standIn(t, 2)
	testkit.CheckLeaks(t, f.InUse)
	for i := range 2 {
		f.Device(i).Set("dmabuf_errno", uint32(syscall.EOPNOTSUPP))
	}
	b, err := open(Config{})
	require.NoError(t, err)
	defer b.Close()
	if pairs := b.Caps().Pairs; pairs[driver.HBM] != 0 || !pairs.Serves(driver.DRAM, driver.HBM) {
		t.Errorf("pairs %v", pairs)
	}
	c := newCard(t, 1<<45, 8192)
	defer c.close(t)
	bare := c.segment(0, 8192)
	bare.DMABuf = nil
	for fix, seg := range map[string]driver.Segment{"Linux 5.12": c.segment(0, 8192),
		"Segment.DMABuf": bare} {
		_, err := b.Register(seg)
		var u *driver.UnavailableError
		if !errors.As(err, &u) || !strings.Contains(u.Fix, fix) {
			t.Errorf("%v, want that %s mends it", err, fix)
		}
	}
}

// TestHBMByPeermem has a kernel that takes device addresses. Memory of this process stands
// for a card's: nothing else would have pages at an address.
func TestHBMByPeermem(t *testing.T) {
	f, open := standIn(t, 4)
	testkit.CheckLeaks(t, f.InUse)
	for i := range 4 {
		f.Device(i).Set("dmabuf_errno", uint32(syscall.EOPNOTSUPP))
	}
	kernel := standInSysfs(t, 4)
	require.NoError(t, os.MkdirAll(filepath.Join(kernel.root, "module", "nvidia_peermem"),
		0o755))
	p := openHBM(t, open, Config{sysfs: kernel})
	if !p.near.Caps().Pairs.Serves(driver.HBM, driver.HBM) {
		t.Errorf("pairs %v", p.near.Caps().Pairs)
	}
	mapped := newCard(t, 0, 64<<10)
	defer mapped.close(t)
	mapped.addr = addressOf(mapped.file)
	bare := mapped.segment(0, 64<<10)
	bare.DMABuf = nil
	scribble(mapped.file, 8)
	l, r := registerHBM(t, p.near, bare), register(t, p.far, 100)
	if err := p.await(t, p.write(t, &memory{span: span{size: 100}, key: l.key}, p.imports(t, r),
		nil)); err != nil || !bytes.Equal(mapped.file[:100], r.bytes) {
		t.Errorf("%v, the right bytes: %v", err, bytes.Equal(mapped.file[:100], r.bytes))
	}
	both := registerHBM(t, p.far, mapped.segment(0, 64<<10)) // its dma-buf is refused
	if text := both.pinned.whyNotPinned(0); text != "" || both.pinned.pins[1] == nil {
		t.Errorf("left out: %s", text)
	}
	far := newCard(t, 1<<45, 8192)
	defer far.close(t)
	if _, err := p.far.Register(far.segment(0, 8192)); !errors.Is(err, syscall.EFAULT) ||
		!strings.Contains(err.Error(), "fake2:1: its driver") {
		t.Errorf("an address without memory: %v", err)
	}
}

// TestHBMThatIsWrong has descriptors that are none, or of something else.
func TestHBMThatIsWrong(t *testing.T) {
	f, open := standIn(t, 2)
	testkit.CheckLeaks(t, f.InUse)
	b, err := open(Config{})
	require.NoError(t, err)
	defer b.Close()
	c := newCard(t, 1<<45, 8192)
	long := c.segment(0, 8192)
	long.Len = 8193
	if _, err := b.Register(long); !errors.Is(err, syscall.EINVAL) ||
		errors.Is(err, driver.ErrUnavailable) ||
		!strings.Contains(err.Error(), "fake1:1: dma-buf: ") {
		t.Errorf("memory that ends before its dma-buf: %v", err)
	}
	odd := c.segment(0, 100)
	odd.DMABuf.Offset = 1
	if _, err := b.Register(odd); !errors.Is(err, driver.ErrBounds) {
		t.Errorf("another place in the page: %v", err)
	}
	if got := cardsOpen(t); got != 1 {
		t.Errorf("%d descriptors, want the test's", got)
	}
	hostmem.AddLent(1<<45, 8192)
	if _, err := b.Register(c.segment(0, 100)); !errors.Is(err, driver.ErrNotSupported) {
		t.Errorf("memory that may be replaced: %v", err)
	}
	hostmem.RemoveLent(1 << 45)
	c.close(t)
	if _, err := b.Register(c.segment(0, 8192)); !errors.Is(err, driver.ErrBounds) ||
		!errors.Is(err, syscall.EBADF) {
		t.Errorf("a descriptor that is closed: %v", err)
	}
	if _, err := b.Register(driver.Segment{Kind: driver.HBM, Len: 1}); !errors.Is(err,
		driver.ErrBounds) {
		t.Errorf("no address: %v", err)
	}
	if len(b.pinnings.list) != 0 || f.Device(0).Get("mrs") != 1 {
		t.Errorf("%d ranges, %d regions are left", len(b.pinnings.list),
			f.Device(0).Get("mrs"))
	}
}

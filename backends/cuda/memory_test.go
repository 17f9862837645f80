// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// TestRegisterRefuses gives addresses that are no memory of the device: each is an error that names
// why, and none is kept.
func TestRegisterRefuses(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	s, err := hbm(1 << 20)
	require.NoError(t, err)
	good := s.Segment
	host, err := drivertest.HostMemory(4096)
	require.NoError(t, err)
	defer host.Free()
	for name, c := range map[string]struct {
		change func(*driver.Segment)
		want   error
		text   string
	}{
		"past the end": {func(s *driver.Segment) {
			s.Len += 4096
		}, driver.ErrBounds, "only 1048576 of them"},
		"another device's": {func(s *driver.Segment) {
			s.Device = 1
		}, driver.ErrBounds, "of device 0"},
		"a device not there": {func(s *driver.Segment) {
			s.Device = 9
		}, driver.ErrNotSupported, "device 9"},
		"host memory": {func(s *driver.Segment) {
			s.Addr, s.Len = addressOf(host.Segment.Mem), 4096
		}, driver.ErrBounds, "not device memory"},
		"no address": {func(s *driver.Segment) {
			s.Addr = 0
		}, driver.ErrBounds, "no device address"},
		"a file": {func(s *driver.Segment) {
			*s = driver.Segment{Kind: driver.File, Len: 1}
		}, driver.ErrNotSupported, "file"},
	} {
		seg := good
		c.change(&seg)
		if _, err := r.b.Register(seg); !errors.Is(err, c.want) ||
			!strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v, want %v and %q", name, err, c.want, c.text)
		}
	}
	require.NoError(t, s.Free())
	if _, err := r.b.Register(good); !errors.Is(err, driver.ErrBounds) ||
		!strings.Contains(err.Error(), "freed") {
		t.Errorf("memory that was freed: %v", err)
	}
}

// TestFreedUnderARegistration frees memory that is registered: copies and kernels fail with the
// driver's word, and the device goes on.
func TestFreedUnderARegistration(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	l, good := r.memory(drivertest.HostMemory, 1<<20), r.memory(hbm, 1<<20)
	gone := r.memory(hbm, 1<<20)
	require.NoError(t, gone.space.Free())
	gone.space.Free = nil
	for _, op := range []driver.Op{driver.Read, driver.Write} {
		err := r.end(r.submit(op, l, gone, driver.Desc{Len: 4096}))
		var piece *driver.PieceError
		var said *gpu.Error
		if !errors.As(err, &piece) || piece.Piece != 0 || !errors.As(err, &said) ||
			said.Result != 1 {
			t.Errorf("%v of freed memory: %v, want piece 0 and the driver's result 1", op, err)
		}
		pages := driver.Pattern{Count: 4, Run: 656, Local: driver.Side{Stride: 656},
			Remote: driver.Side{Stride: 656}, LocalKey: l.m.key, RemoteKey: gone.key}
		if err := r.p.Submit(99, &driver.Batch{Op: op, Pattern: &pages}); !errors.As(err, &said) {
			t.Errorf("pages of freed memory: %v, want the driver's result", err)
		}
		r.move(op, l, good, driver.Desc{Len: 1 << 20})
	}
	r.same("after failures", r.content(good), r.content(l))
}

// TestPins has registrations share what is pinned, and give it back with the last.
func TestPins(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	s, err := drivertest.HostMemory(1 << 20)
	require.NoError(t, err)
	defer s.Free()
	before := libcuda.Get("pins")
	whole := r.register(s.Segment)
	part, err := s.Segment.Slice(4096, 8192, [16]byte{})
	require.NoError(t, err)
	inner := r.register(part)
	if n := libcuda.Get("pins") - before; n != 1 || pins.bytes() != 1<<20 {
		t.Errorf("%d ranges and %d bytes are pinned for a range and a part of it", n, pins.bytes())
	}
	if err := whole.Revoke(context.Background()); err != nil {
		t.Error(err)
	}
	if n := libcuda.Get("pins") - before; n != 1 || !inner.pin.pinned() {
		t.Errorf("%d ranges are pinned for the part that is left", n)
	}
	if err := inner.Revoke(context.Background()); err != nil {
		t.Error(err)
	}
	if n := libcuda.Get("pins") - before; n != 0 || pins.bytes() != 0 {
		t.Errorf("%d ranges are pinned for nothing", n)
	}
}

// TestNotPinned moves memory that the driver does not pin, or that overlaps what it has pinned, and
// says so.
func TestNotPinned(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	d := r.memory(hbm, 4<<20)
	whole, err := drivertest.HostMemory(4 << 20)
	require.NoError(t, err)
	t.Cleanup(func() { _ = r.b.Close(); _ = whole.Free() })
	half, err := whole.Segment.Slice(0, 2<<20, [16]byte{})
	require.NoError(t, err)
	r.register(half)
	overlapping := func(uint64) (*drivertest.Space, error) {
		return &drivertest.Space{Segment: whole.Segment}, nil
	}
	for name, c := range map[string]struct {
		alloc drivertest.Allocator
		pin   uint32
		why   string
	}{
		"a limit":  {drivertest.HostMemory, 2, "STANDIN_ERROR (2)"},
		"overlaps": {overlapping, 0, "register the largest range first"},
	} {
		libcuda.Set(t, "pin_result", c.pin)
		l := r.memory(c.alloc, 4<<20)
		if text := r.p.Explain(l.m.key, d.key); !strings.Contains(text, "not pinned") ||
			!strings.Contains(text, c.why) {
			t.Errorf("%s: Explain says %q", name, text)
		}
		r.move(driver.Write, l, d, driver.Desc{Len: 4 << 20})
		r.same(name+", written", r.content(d), r.content(l))
		r.fill(d)
		r.move(driver.Read, l, d, driver.Desc{Len: 4 << 20})
		r.same(name+", read", r.content(l), r.content(d))
		pages := driver.Pattern{Count: 64, Run: 656, Local: driver.Side{Stride: 1024},
			Remote: driver.Side{Stride: 656}, LocalKey: l.m.key, RemoteKey: d.key}
		r.pages(driver.Write, &pages, l, d)
	}
}

// TestNotUnpinned has the driver not unpin memory: Close says so, and tries again. The key is no
// other memory's meanwhile.
func TestNotUnpinned(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	before := libcuda.Get("pins")
	l, d := r.memory(drivertest.HostMemory, 1<<20), r.memory(hbm, 1<<20)
	libcuda.Set(t, "unpin_result", 304) // of the system
	require.Error(t, l.m.Revoke(context.Background()))
	require.NotEqual(t, l.m.key, r.memory(hbm, 1<<20).m.key)
	require.Error(t, l.m.Revoke(context.Background()))
	libcuda.Put("unpin_result", 0)
	require.NoError(t, l.m.Revoke(context.Background()))
	require.Equal(t, before, libcuda.Get("pins"))
	r.register(d.space.Segment)
}

// TestPinnedByTheProgram accepts memory that another part of the program has pinned.
func TestPinnedByTheProgram(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	s, err := drivertest.HostMemory(1 << 20)
	require.NoError(t, err)
	other, err := openCard(0)
	require.NoError(t, err)
	if _, err := other.Pin(s.Segment.Mem); err != nil {
		t.Fatal(err)
	}
	d := r.memory(hbm, 1<<20)
	l := &place{space: s, m: r.register(s.Segment)}
	if text := r.p.Explain(l.m.key, d.key); !strings.Contains(text, "memory pinned") ||
		pins.bytes() != 0 {
		t.Errorf("Explain says %q, and %d bytes are ours", text, pins.bytes())
	}
	r.move(driver.Read, l, d, driver.Desc{Len: 1 << 20})
	r.same("memory that the program pinned", r.content(l), r.content(d))
	if err := l.m.Revoke(context.Background()); err != nil {
		t.Error(err)
	}
	if err := other.Unpin(s.Segment.Mem); err != nil {
		t.Errorf("the other's pin: %v", err)
	}
	_ = s.Free()
}

// TestAllocDevice moves bytes of memory that the backend made, and looks at its dma-buf.
func TestAllocDevice(t *testing.T) {
	r := newRig(t, testConfig())
	seg, owner, err := r.b.AllocDevice(0, 3<<20+5)
	require.NoError(t, err)
	if seg.Len != 3<<20+5 || seg.Check() != nil {
		t.Errorf("%+v: %v", seg, seg.Check())
	}
	m := r.register(seg)
	d := &place{m: m, key: r.imported(m)}
	l := r.memory(drivertest.HostMemory, seg.Len)
	want := r.content(l)
	r.move(driver.Write, l, d, driver.Desc{Len: seg.Len})
	r.fill(l)
	r.move(driver.Read, l, d, driver.Desc{Len: seg.Len})
	r.same("memory of AllocDevice", r.content(l), want)
	if libcuda != nil {
		r.exported(seg, want)
	}
	require.NoError(t, r.b.Close())
	for range 2 {
		if err := owner.Close(); err != nil {
			t.Errorf("close after the backend: %v", err)
		}
	}
	_, _, err = r.b.AllocDevice(0, 1)
	sameError(t, "AllocDevice of a closed backend", err, driver.ErrClosed)
}

// exported reads the bytes through the dma-buf, which is a file here.
func (r *rig) exported(seg driver.Segment, want []byte) {
	r.t.Helper()
	if seg.DMABuf == nil {
		r.t.Fatal("no dma-buf")
	}
	got := make([]byte, len(want))
	if n, err := unix.Pread(seg.DMABuf.FD, got, int64(seg.DMABuf.Offset)); n != len(want) ||
		err != nil {
		r.t.Fatalf("read the dma-buf: %d, %v", n, err)
	}
	r.same("the dma-buf", got, want)
}

func TestAllocDeviceRefuses(t *testing.T) {
	r := newRig(t, testConfig())
	for _, n := range []uint64{0, 1 << 62} {
		_, _, err := r.b.AllocDevice(0, n)
		sameError(t, "a length that cannot be", err, driver.ErrBounds)
	}
	_, _, err := r.b.AllocDevice(12, 1)
	sameError(t, "a device that is not there", err, driver.ErrNotSupported)
	var said *gpu.Error
	if _, _, err := r.b.AllocDevice(0, 1<<59); !errors.As(err, &said) {
		t.Errorf("more than there is: %v, want the driver's result", err)
	}
}

// TestOldDriverMoves has a driver without virtual memory management and dma-bufs: all goes on, with
// what it has.
func TestOldDriverMoves(t *testing.T) {
	if !alone(t, "-DSTANDIN_OLD") {
		return
	}
	unavailable(t, peersConfig(), "Config.Peers")
	r := newRig(t, testConfig())
	seg, owner, err := r.b.AllocDevice(1, 1<<20)
	require.NoError(t, err)
	if seg.DMABuf != nil || seg.Addr%uint64(os.Getpagesize()) != 0 {
		t.Errorf("%+v", seg)
	}
	l, d := r.memory(drivertest.HostMemory, 1<<20), r.memory(hbm, 1<<20)
	r.move(driver.Write, l, d, driver.Desc{Len: 1 << 20})
	r.same("device memory", r.content(d), r.content(l))
	if err := owner.Close(); err != nil {
		t.Error(err)
	}
}

// TestFaultOfAGather spoils host memory that a processor gathers: the thread that does takes the
// fault for the end of the transfer.
func TestFaultOfAGather(t *testing.T) {
	onStandIn(t)
	cfg := testConfig()
	cfg.Budget = cuda.Budget{} // no kernel
	r := newRig(t, cfg)
	const entry, count = 656, 400
	mem, err := unix.Mmap(-1, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANON)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Munmap(mem)) }()
	l, d := r.register(driver.Segment{Kind: driver.DRAM, Len: uint64(len(mem)), Mem: mem}),
		r.memory(hbm, 1<<20)
	p := driver.Pattern{Count: count, Run: entry, LocalKey: l.key, RemoteKey: d.key,
		Local:  driver.Side{Stride: entry, List: shuffled(count, 1)},
		Remote: driver.Side{Stride: entry}}
	for range 2 {
		require.NoError(t, unix.Mprotect(mem[64<<10:], unix.PROT_NONE))
		for i, op := range []driver.Op{driver.Read, driver.Write} {
			tag := 200 + uint64(i)
			require.NoError(t, r.p.Submit(tag, &driver.Batch{Op: op, Pattern: &p}))
			require.ErrorIs(t, r.end(tag), driver.ErrFault)
		}
		require.NoError(t, unix.Mprotect(mem, unix.PROT_READ|unix.PROT_WRITE))
		require.NoError(t, r.p.Submit(300, &driver.Batch{Op: driver.Write, Pattern: &p}))
		require.NoError(t, r.end(300))
	}
}

func TestConfig(t *testing.T) {
	for name, c := range map[string]Config{
		"streams": {Streams: 33}, "negative": {Gated: -1}, "no power of two": {BatchesMax: 1000},
		"negative budget": {Budget: cuda.Budget{SMs: -1}}, "keys": {KeysMax: 1 << 30},
		"peers": {PeersMax: 1 << 20}, "grace": {RevokeGrace: -1}, "dial": {DialTimeout: -1},
	} {
		if _, err := New(c); !errors.Is(err, driver.ErrBounds) ||
			!strings.Contains(err.Error(), "config: ") {
			t.Errorf("%s: %v, want %v and the field", name, err, driver.ErrBounds)
		}
	}
}

// unavailable opens a backend, which must say that this machine cannot, and why.
func unavailable(t *testing.T, cfg Config, reason string) {
	t.Helper()
	b, err := New(cfg)
	if err == nil {
		_ = b.Close()
	}
	var u *driver.UnavailableError
	if !errors.As(err, &u) || !strings.Contains(u.Reason, reason) || u.Fix == "" {
		t.Errorf("%v, want a *driver.UnavailableError about %q with what to do", err, reason)
	}
}

func TestOpenRefuses(t *testing.T) {
	onStandIn(t)
	newRig(t, testConfig()) // looks for what the failures leave behind
	cfg := testConfig()
	cfg.Devices = []int{0, 7}
	unavailable(t, cfg, "no device 7")
	for _, list := range [][]int{{0, 0}, {}} {
		cfg.Devices = list
		_, err := New(cfg)
		sameError(t, "devices twice, or none", err, driver.ErrBounds)
	}
	cfg = testConfig()
	t.Run("old card", func(t *testing.T) {
		t.Setenv("STANDIN_COMPUTE", "70")
		unavailable(t, cfg, "compute capability 8.0")
	})
	t.Run("old card without a kernel", func(t *testing.T) {
		t.Setenv("STANDIN_COMPUTE", "70")
		b, err := New(Config{Library: cfg.Library})
		require.NoError(t, err)
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Run("no device", func(t *testing.T) {
		t.Setenv("STANDIN_DEVICES", "0")
		unavailable(t, cfg, "no device")
	})
	cfg.Library = "/nowhere/libcuda.so.1"
	unavailable(t, cfg, "/nowhere/libcuda.so.1")
}

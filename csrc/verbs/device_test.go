// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"bytes"
	"errors"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/fakeverbs"
)

// deviceAddr is where nothing of this process is.
const deviceAddr = 1 << 46

// deviceFile stands for a dma-buf: a descriptor, and the bytes behind it.
func deviceFile(t testing.TB, n int) (fd int, mem []byte) {
	t.Helper()
	fd, err := unix.MemfdCreate("dma-buf", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	require.NoError(t, unix.Ftruncate(fd, int64(n)))
	mem, err = unix.Mmap(fd, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = unix.Munmap(mem)
		_ = unix.Close(fd)
	})
	return fd, mem
}

func pinDevice(t testing.TB, c *Context, d Device) *Pin {
	t.Helper()
	p, err := c.PinDevice(0, d, 0)
	require.NoError(t, err)
	return p
}

// between moves one piece between two keys.
func (l *testLink) between(t *testing.T, op driver.Op, d driver.Desc) error {
	t.Helper()
	l.tag++
	require.NoError(t, l.conn.Submit(l.tag, batchOf(op, []driver.Desc{d}, nil)))
	return l.outcome(t, l.tag)
}

// TestDeviceMemory moves bytes out of a dma-buf and into one. No pointer leads there, so
// nothing of it may be sent inline.
func TestDeviceMemory(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{})
	fd, mem := deviceFile(t, 64<<10)
	fill(mem, 3)
	pin := pinDevice(t, l.near, Device{Addr: deviceAddr + 100, Len: 20_000, FD: fd,
		Offset: 8192 + 100})
	const key = 9
	require.NoError(t, l.near.MapDevice(key, deviceAddr+150, 10_000, []*Pin{pin}, 1))
	mine := mem[8192+150:][:10_000]
	inlined := d.fake.Device(0).Get(fakeverbs.Inlined)
	for _, n := range []uint64{8, 9000} {
		require.NoError(t, l.between(t, driver.Write, driver.Desc{Local: 500, Remote: 7, Len: n,
			LocalKey: key, RemoteKey: l.slot}))
		if !bytes.Equal(mine[500:500+n], l.remote[7:7+n]) {
			t.Errorf("%d bytes were written from elsewhere", n)
		}
	}
	if n := d.fake.Device(0).Get(fakeverbs.Inlined); n != inlined {
		t.Errorf("%d requests carried the bytes of a device", n-inlined)
	}
	fill(l.remote, 4)
	want := bytes.Clone(mem)
	copy(want[8192+150+1000:], l.remote[60:60+4000])
	require.NoError(t, l.between(t, driver.Read, driver.Desc{Local: 1000, Remote: 60, Len: 4000,
		LocalKey: key, RemoteKey: l.slot}))
	if !bytes.Equal(mem, want) {
		t.Error("other bytes than those that were read")
	}
	if n := d.fake.Device(0).Get(fakeverbs.DMABufs); n != 1 {
		t.Errorf("%d registrations of a dma-buf, want 1", n)
	}
	l.near.Unmap(key)
	if err := pin.Close(); err != nil {
		t.Error(err)
	}
}

// TestGrantsOfDeviceMemory registers parts of a dma-buf again, epoch after epoch.
func TestGrantsOfDeviceMemory(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{})
	fd, mem := deviceFile(t, 64<<10)
	pin := pinDevice(t, l.far, Device{Addr: deviceAddr, Len: 40_000, FD: fd, Offset: 4096})
	const key, at = 9, 12_345
	require.NoError(t, l.far.MapDevice(key, deviceAddr+at, 5000, []*Pin{pin}, 1))
	far := d.fake.Device(1)
	for epoch := range uint32(3) {
		k, err := l.far.Grant(key, 0, deviceAddr+at, 0)
		require.NoError(t, err)
		if n := far.Get(fakeverbs.DMABufs); n != 2+epoch {
			t.Errorf("epoch %d: %d registrations of a dma-buf", epoch, n)
		}
		slot, err := l.conn.Import(Import{Base: deviceAddr + at, Size: 5000,
			RemoteKeys: []uint32{k}})
		require.NoError(t, err)
		fill(l.local, uint64(epoch)+1)
		want := bytes.Clone(mem)
		copy(want[4096+at+10:], l.local[:4990])
		require.NoError(t,
			l.between(t, driver.Write, driver.Desc{Remote: 10, Len: 4990, LocalKey: testKey,
				RemoteKey: slot}))
		if !bytes.Equal(mem, want) {
			t.Errorf("epoch %d: the bytes landed elsewhere", epoch)
		}
		require.NoError(t, l.far.Revoke(key))
	}
	l.far.Unmap(key)
	if err := pin.Close(); err != nil {
		t.Error(err)
	}
}

// TestDeviceMemoryThatIsRefused has what drivers and the kernel say no to.
func TestDeviceMemoryThatIsRefused(t *testing.T) {
	f, c := fixture(t, 2)
	f.Device(1).Set(fakeverbs.DMABufErrno, uint32(syscall.EOPNOTSUPP))
	openRails(t, c, f, 2)
	for rail, want := range []bool{true, false} {
		if r, err := c.Rail(rail); err != nil || r.DMABuf != want {
			t.Errorf("rail %d takes a dma-buf: %v, %v", rail, r.DMABuf, err)
		}
	}
	fd, _ := deviceFile(t, 8192)
	good := Device{Addr: deviceAddr, Len: 8192, FD: fd}
	if _, err := c.PinDevice(1, good, 0); !errors.Is(err, syscall.EOPNOTSUPP) {
		t.Errorf("a driver without: %v", err)
	}
	for name, bad := range map[string]Device{
		"past the end":           {Addr: deviceAddr, Len: 8193, FD: fd},
		"elsewhere in the page":  {Addr: deviceAddr + 1, Len: 100, FD: fd},
		"no bytes":               {Addr: deviceAddr, FD: fd},
		"an end beyond the last": {Addr: deviceAddr, Len: 8192, FD: fd, Offset: 1<<64 - 4096},
	} {
		if _, err := c.PinDevice(0, bad, 0); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := c.PinDevice(0, Device{Addr: deviceAddr, Len: 8192, FD: -1}, 0); !errors.Is(err,
		syscall.EFAULT) {
		t.Errorf("an address that the kernel does not know: %v", err)
	}
	if n := f.Device(0).Get(fakeverbs.Regions); n != 1 {
		t.Errorf("%d regions, want the receives", n)
	}
}

// TestGoneInline writes a few bytes of memory that cannot be read any more, while the device holds
// its pages. The library of a device would copy them by itself, and fault: the device fetches them.
func TestGoneInline(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{})
	fill(l.local, 5)
	dev := d.fake.Device(0)
	for _, gone := range []bool{true, false} {
		dev.Set(fakeverbs.Frozen, 1)
		inlined := dev.Get(fakeverbs.Inlined)
		if gone {
			require.NoError(t, unix.Mprotect(l.local, unix.PROT_NONE))
		}
		tag := l.submit(t, driver.Write, nil, driver.Desc{Local: 4000, Remote: 70, Len: 10},
			driver.Desc{Local: 5000, Remote: 80, Len: 54})
		require.NoError(t, unix.Mprotect(l.local, unix.PROT_READ|unix.PROT_WRITE))
		require.Equal(t, gone, dev.Get(fakeverbs.Inlined) == inlined)
		dev.Set(fakeverbs.Frozen, 0)
		require.NoError(t, l.outcome(t, tag))
		require.Equal(t, l.local[4000:4010], l.remote[70:80])
		require.Equal(t, l.local[5000:5054], l.remote[80:134])
		fill(l.local, 6)
	}
}

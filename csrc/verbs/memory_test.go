// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"errors"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// pages returns memory outside of the Go heap.
func pages(t testing.TB, n int) []byte {
	t.Helper()
	mem, err := syscall.Mmap(-1, 0, n, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|
		syscall.MAP_ANONYMOUS)
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := syscall.Munmap(mem); err != nil {
			t.Error(err)
		}
	})
	return mem
}

func mustPin(t testing.TB, c *Context, rail int, mem []byte, flags uint32) Pin {
	t.Helper()
	p, err := c.Pin(rail, rangeOf(mem), flags)
	require.NoError(t, err)
	return p
}

func TestPinsAndMaps(t *testing.T) {
	f, c := fixture(t, 2)
	openRails(t, c, f, 2)
	mem := pages(t, 8192)
	p0, p1 := mustPin(t, c, 0, mem, 0), mustPin(t, c, 1, mem[4096:], Relaxed)
	if _, err := c.Pin(2, rangeOf(mem), 0); err == nil {
		t.Error("pinned on a rail that does not exist")
	}
	if _, err := c.Pin(0, rangeOf(mem[:0]), 0); err == nil {
		t.Error("pinned nothing")
	}
	for name, x := range map[string]struct {
		key  uint32
		mem  []byte
		pins []Pin
	}{
		"no pins":                    {1, mem, nil},
		"a pin of another rail":      {1, mem, []Pin{nil, p0}},
		"a pin that begins later":    {1, mem, []Pin{p0, p1}},
		"a pin that ends earlier":    {1, mem[:4096], []Pin{nil, p1}},
		"no memory":                  {1, mem[:0], []Pin{p0}},
		"a key beyond the last":      {KeysMax, mem, []Pin{p0}},
		"a key far beyond the last":  {1<<32 - 1, mem, []Pin{p0}},
		"more pins than rails there": {1, mem, make([]Pin, RailsMax+1)},
	} {
		if err := mapRange(c, x.key, x.mem, x.pins, 1); err == nil {
			t.Errorf("%s: mapped", name)
		}
	}
	for _, key := range []uint32{0, 1, KeysMax - 1} {
		require.NoError(t, mapRange(c, key, mem[4096:], []Pin{p0, p1}, 3))
	}
	if err := mapRange(c, 1, mem, []Pin{p0}, 1); !errors.Is(err, syscall.EEXIST) {
		t.Errorf("a key that is not free: %v", err)
	}
	if err := p1.Close(); !errors.Is(err, driver.ErrBusy) {
		t.Errorf("a pin that is in use was closed: %v", err)
	}
	for _, key := range []uint32{0, 1, KeysMax - 1, 77} {
		c.Unmap(key)
	}
	for range 2 {
		if err := p1.Close(); err != nil {
			t.Error(err)
		}
	}
	if n := f.Device(1).Get("mrs"); n != 1 {
		t.Errorf("%d regions of a device where only the receives should be left", n)
	}
}

func TestGrantsLastForAnEpoch(t *testing.T) {
	f, c := fixture(t, 2)
	openRails(t, c, f, 2)
	mem := pages(t, 8192)
	require.NoError(t, mapRange(c, 5, mem, []Pin{mustPin(t, c, 0, mem, 0), nil}, 1))
	first, err := c.Grant(5, 0, 0, 0)
	require.NoError(t, err)
	if again, err := c.Grant(5, 0, 0, ReadOnly); again != first || err != nil {
		t.Errorf("granted again: key %#x, then %#x, %v", first, again, err)
	}
	if _, err := c.Grant(5, 1, 0, 0); err == nil {
		t.Error("granted on a rail without a pin")
	}
	if _, err := c.Grant(5, 99, 0, 0); err == nil {
		t.Error("granted on a rail that does not exist")
	}
	if _, err := c.Grant(6, 0, 0, 0); err == nil {
		t.Error("granted memory that is not known")
	}
	f.Device(0).Set("frozen", 1) // it is nobody else's business
	if err := c.Revoke(5); err != nil {
		t.Error(err)
	}
	if err := c.Revoke(5); err != nil {
		t.Errorf("nothing is granted: %v", err)
	}
	if n := f.Device(0).Get("mrs"); n != 2 {
		t.Errorf("%d regions, want the receives and the pin", n)
	}
	second, err := c.Grant(5, 0, 0, 0)
	if err != nil || second != first {
		t.Errorf("in the next epoch: key %#x, then %#x, %v: the stand-in gives no key out again",
			first, second, err)
	}
}

func TestGrantsOfReadOnlyMemory(t *testing.T) {
	f, c := fixture(t, 1)
	openRails(t, c, f, 1)
	mem := pages(t, 4096)
	require.NoError(t, mapRange(c, 1, mem, []Pin{mustPin(t, c, 0, mem, ReadOnly)}, 0))
	if _, err := c.Grant(1, 0, 0, 0); !errors.Is(err, driver.ErrReadOnly) {
		t.Errorf("read-only memory was granted for writing: %v", err)
	}
	if _, err := c.Grant(1, 0, 0, ReadOnly); err != nil {
		t.Error(err)
	}
}

// What the NIC does not give up is still granted, and may be given up later.
func TestRevokeThatFails(t *testing.T) {
	f, c := fixture(t, 2)
	openRails(t, c, f, 2)
	mem := pages(t, 4096)
	require.NoError(t, mapRange(c, 1, mem,
		[]Pin{mustPin(t, c, 0, mem, 0), mustPin(t, c, 1, mem, 0)}, 3))
	var keys [2]uint32
	for i := range keys {
		var err error
		keys[i], err = c.Grant(1, i, 0, 0)
		require.NoError(t, err)
	}
	f.Device(1).Set("deregister_busy", 1)
	if err := c.Revoke(1); !errors.Is(err, driver.ErrBusy) {
		t.Errorf("revoked: %v", err)
	}
	if a, b := f.Device(0).Get("mrs"), f.Device(1).Get("mrs"); a != 2 ||
		b != 3 {
		t.Errorf("%d and %d regions, want only the second grant left", a, b)
	}
	if k, err := c.Grant(1, 1, 0, 0); k != keys[1] || err != nil {
		t.Errorf("key %#x after a revoke that failed, want %#x, %v", k, keys[1], err)
	}
	if err := c.Revoke(1); err != nil {
		t.Error(err)
	}
	f.Device(1).Set("deregister_busy", 1)
	p := mustPin(t, c, 1, mem, 0)
	if err := p.Close(); !errors.Is(err, driver.ErrBusy) {
		t.Errorf("a pin that the NIC keeps was closed: %v", err)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

// TestUnmapThatFails keeps the memory until the NIC has given up the grant: a peer that was
// told the key could use it.
func TestUnmapThatFails(t *testing.T) {
	f, c := fixture(t, 1)
	openRails(t, c, f, 1)
	mem := pages(t, 4096)
	p := mustPin(t, c, 0, mem, 0)
	require.NoError(t, mapRange(c, 1, mem, []Pin{p}, 1))
	key, err := c.Grant(1, 0, 0, 0)
	require.NoError(t, err)
	f.Device(0).Set("deregister_busy", 1)
	require.ErrorIs(t, c.Unmap(1), driver.ErrBusy)
	require.ErrorIs(t, p.Close(), driver.ErrBusy, "the memory is still known")
	again, err := c.Grant(1, 0, 0, 0)
	require.NoError(t, err)
	require.Equal(t, key, again)
	require.NoError(t, c.Unmap(1))
	require.NoError(t, c.Unmap(1), "of an unknown key")
	require.NoError(t, p.Close())
	require.EqualValues(t, 1, f.Device(0).Get("mrs"), "that of the receives")
}

// A device that was pulled out knows no keys, although it does not say so.
func TestRevokeOfADeviceThatIsGone(t *testing.T) {
	f, c := fixture(t, 2)
	openRails(t, c, f, 2)
	mem := pages(t, 4096)
	p := mustPin(t, c, 0, mem, 0)
	require.NoError(t, mapRange(c, 1, mem, []Pin{p, mustPin(t, c, 1, mem, 0)}, 3))
	for rail := range 2 {
		if _, err := c.Grant(1, rail, 0, 0); err != nil {
			t.Fatal(err)
		}
	}
	f.Device(0).Set("fatal", 2)
	for end := time.Now().Add(patience); c.Revoke(1) != nil; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("revoke still waits for a device that is gone")
		}
	}
	c.Unmap(1)
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if n := f.Device(1).Get("mrs"); n != 2 {
		t.Errorf("%d regions of the device that is there, want the receives and the pin", n)
	}
}

func TestRegistrationThatFails(t *testing.T) {
	f, c := fixture(t, 1)
	openRails(t, c, f, 1)
	mem := pages(t, 1<<20)
	f.Device(0).Set("locked_kib", f.Device(0).Get("kib_locked")+1500)
	p := mustPin(t, c, 0, mem, 0)
	if _, err := c.Pin(0, rangeOf(mem), 0); !errors.Is(err, syscall.ENOMEM) ||
		!strings.Contains(err.Error(), "ulimit -l") {
		t.Errorf("beyond the limit of locked memory: %v", err)
	}
	require.NoError(t, mapRange(c, 1, mem, []Pin{p}, 1))
	if _, err := c.Grant(1, 0, 0, 0); !errors.Is(err, syscall.ENOMEM) {
		t.Errorf("granted beyond the limit of locked memory: %v", err)
	}
	f.Device(0).Set("locked_kib", 0)
	if _, err := c.Grant(1, 0, 0, 0); err != nil {
		t.Errorf("granted after a failure: %v", err)
	}
	gone := pages(t, 8192)
	require.NoError(t, syscall.Mprotect(gone, syscall.PROT_NONE))
	f.Device(0).Set("register_errno", uint32(syscall.EFAULT))
	if _, err := c.Pin(0, rangeOf(gone), 0); !errors.Is(err, syscall.EFAULT) {
		t.Errorf("memory that is not there: %v", err)
	}
}

// Grants are made and ended without the lock, so all orders may happen.
func TestGrantsOfManyAtOnce(t *testing.T) {
	f, c := fixture(t, 1)
	openRails(t, c, f, 1)
	mem := pages(t, 4096)
	p := mustPin(t, c, 0, mem, 0)
	f.Device(0).Set("register_us", 300)
	f.Device(0).Set("deregister_us", 300)
	for round := range 5 {
		require.NoError(t, mapRange(c, 1, mem, []Pin{p}, 1))
		keys := make([]uint32, 8)
		var all sync.WaitGroup
		for i := range keys {
			all.Go(func() { keys[i], _ = c.Grant(1, 0, 0, 0) })
		}
		if round == 0 {
			all.Wait()
			for _, k := range keys {
				if k == 0 || k != keys[0] {
					t.Fatalf("keys %#x of one epoch", keys)
				}
			}
		}
		all.Go(func() { c.Revoke(1) })
		all.Go(func() { c.Grant(1, 0, 0, 0) })
		if round > 1 {
			time.Sleep(time.Duration(round) * 100 * time.Microsecond)
			all.Go(func() { c.Unmap(1) })
		}
		all.Wait()
		c.Unmap(1)
		if n := f.Device(0).Get("mrs"); n != 2 {
			t.Fatalf("round %d: %d regions, want the receives and the pin", round, n)
		}
	}
}

// Close waits for what is being registered, and forgets all of it.
func TestCloseWhileMemoryIsRegistered(t *testing.T) {
	f, c := fixture(t, 1)
	openRails(t, c, f, 1)
	mem := pages(t, 4096)
	kept := mustPin(t, c, 0, mem, 0)
	require.NoError(t, mapRange(c, 1, mem, []Pin{kept}, 1))
	f.Device(0).Set("register_us", 20000)
	var all sync.WaitGroup
	pins := make([]Pin, 4)
	for i := range pins {
		all.Go(func() { pins[i], _ = c.Pin(0, rangeOf(mem), 0) })
	}
	all.Go(func() { c.Grant(1, 0, 0, 0) })
	time.Sleep(5 * time.Millisecond)
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	all.Wait()
	if n := f.InUse(); len(n) != 0 {
		t.Errorf("closed, and %v is in use", n)
	}
	for _, p := range append(pins, kept) {
		if p == nil {
			continue
		}
		if err := p.Close(); err != nil {
			t.Errorf("a pin that the context has outlived: %v", err)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"context"
	"errors"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

func (f *fakeNet) pinned() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.pins
}

// TestPinsAreShared registers parts of memory that is pinned: the NICs are not asked again.
func TestPinsAreShared(t *testing.T) {
	leak.Check(t)
	b := openFakeBackend(t, Config{})
	mem := make([]byte, 100_000)
	add := func(part []byte, want int) *memory {
		t.Helper()
		m, err := b.Register(driver.Segment{Kind: driver.DRAM, Len: uint64(len(part)), Mem: part})
		require.NoError(t, err)
		if got := fakeOf(b).pinned(); got != want {
			t.Errorf("%d pins, want %d", got, want)
		}
		return m.(*memory)
	}
	whole := add(mem[1000:50_000], 2)
	parts := []*memory{add(mem[1000:2000], 2), add(mem[49_999:50_000], 2), add(mem[1000:50_000], 2)}
	over := add(mem[40_000:60_000], 4)
	around := add(mem, 6)
	inBoth := add(mem[45_000:50_000], 6)
	for _, m := range append(parts, whole) {
		if err := m.Revoke(context.Background()); err != nil {
			t.Error(err)
		}
	}
	for _, m := range []*memory{around, over, inBoth} {
		if err := m.Revoke(context.Background()); err != nil {
			t.Error(err)
		}
	}
	if got := fakeOf(b).pinned(); got != 0 || len(b.pinnings.list) != 0 {
		t.Errorf("%d pins, %d ranges are left", got, len(b.pinnings.list))
	}
}

func TestMemlock(t *testing.T) {
	limited := func(limit, used uint64) memlock {
		return memlock{limits: func() (uint64, uint64, bool) { return limit, used, true }}
	}
	for _, c := range []struct {
		m     memlock
		n     uint64
		rails int
		fits  bool
	}{
		{limited(64<<10, 0), 64 << 10, 1, true}, {limited(64<<10, 0), 64<<10 + 1, 1, false},
		{limited(64<<10, 0), 64 << 10, 2, false},
		{limited(64<<10, 60<<10), 4 << 10, 1, true}, {limited(64<<10, 60<<10), 8 << 10, 1, false},
		{limited(64<<10, 70<<10), 1, 1, false},
		{limited(64<<10, 0), ^uint64(0), 16, false},
		{memlock{exempt: true}, 1 << 40, 8, true},
		{memlock{limits: func() (uint64, uint64, bool) { return 0, 0, false }}, 1 << 40, 8, true},
	} {
		err := c.m.check(c.n, c.rails)
		if (err == nil) != c.fits {
			t.Errorf("%d bytes on %d rails: %v", c.n, c.rails, err)
		}
		var u *driver.UnavailableError
		if err != nil && (!errors.As(err, &u) || !strings.Contains(u.Fix, "ulimit -l unlimited")) {
			t.Errorf("%v does not say what mends it", err)
		}
	}
	m := thisMemlock()
	if limit, _, ok := m.limits(); ok && limit == 0 {
		t.Error("a limit of nothing")
	}
	if err := m.explain(syscall.ENOMEM, 1, 1); !errors.Is(err, driver.ErrUnavailable) {
		t.Errorf("ENOMEM of the kernel: %v", err)
	}
	if err := m.explain(syscall.EFAULT, 1, 1); err != syscall.EFAULT {
		t.Errorf("another error: %v", err)
	}
}

// TestMemlockOfRegister says so before the NICs are asked.
func TestMemlockOfRegister(t *testing.T) {
	b := openFakeBackend(t, Config{})
	b.locked = memlock{limits: func() (uint64, uint64, bool) { return 4096, 0, true }}
	_, err := b.Register(driver.Segment{Kind: driver.DRAM, Len: 4096, Mem: make([]byte, 4096)})
	if !errors.Is(err, driver.ErrUnavailable) || fakeOf(b).pinned() != 0 {
		t.Errorf("%v, %d pins", err, fakeOf(b).pinned())
	}
}

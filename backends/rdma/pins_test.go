// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package rdma

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/standin"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// registered counts registrations of the devices of newFake.
func registered(f *standin.VerbsFabric) int {
	return int(f.Device(0).Get("mrs") + f.Device(1).Get("mrs"))
}

// TestPinsAreShared registers parts of memory that is pinned: the NICs are not asked again.
func TestPinsAreShared(t *testing.T) {
	f, _ := standIn(t, 2)
	testkit.CheckLeaks(t, f.InUse)
	b := openFakeBackend(t, Config{})
	before := registered(f)
	mem := make([]byte, 100_000)
	add := func(part []byte, want int) *memory {
		t.Helper()
		m, err := b.Register(driver.Segment{Kind: driver.DRAM, Len: uint64(len(part)), Mem: part})
		require.NoError(t, err)
		if got := registered(f) - before; got != want {
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
	if got := registered(f) - before; got != 0 || len(b.pinnings.list) != 0 {
		t.Errorf("%d pins, %d ranges are left", got, len(b.pinnings.list))
	}
}

// TestRegisterHolds has pages stay where they are for as long as NICs may know them, and no longer:
// a NIC would go on with the old ones.
func TestRegisterHolds(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	buf, err := hostmem.Alloc(64<<10, hostmem.Options{Purpose: "test"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = buf.Close() }) // after the backends
	p := newPair(t, nil, Config{}, Config{KeysMax: 1})
	renews := func(when string, want error) {
		t.Helper()
		if err := buf.Renew(t.Context(), 0, 4096); !errors.Is(err, want) {
			t.Errorf("fresh pages %s: %v, want %v", when, err, want)
		}
	}
	registered, err := p.far.Register(buf.Segment())
	require.NoError(t, err)
	m := registered.(*memory)
	renews("while it is registered", driver.ErrBusy)
	p.imports(t, m)
	p.fabric.Device(1).Set("deregister_busy", 2)
	if err := m.Revoke(t.Context()); !errors.Is(err, driver.ErrBusy) {
		t.Fatalf("close memory whose key the NIC keeps: %v", err)
	}
	renews("while a NIC keeps its key", driver.ErrBusy)
	require.NoError(t, m.Revoke(t.Context()))
	renews("when it is closed", nil)
	other := register(t, p.far, 100)
	if _, err := p.far.Register(buf.Segment()); !errors.Is(err, driver.ErrFull) {
		t.Errorf("one memory too many: %v", err)
	}
	renews("after it was refused a key", nil)
	require.NoError(t, other.Revoke(t.Context()))
	p.fabric.Device(1).Set("register_errno", uint32(syscall.ENOMEM))
	var u *driver.UnavailableError
	if _, err := p.far.Register(buf.Segment()); !errors.As(err, &u) ||
		!strings.Contains(u.Fix, "ulimit -l unlimited") {
		t.Errorf("more than may be pinned: %v", err)
	}
	renews("after it was not pinned", nil)
}

// freshMemory has no pages yet.
func freshMemory(t testing.TB, n int) []byte {
	t.Helper()
	mem, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|
		unix.MAP_ANONYMOUS)
	require.NoError(t, err)
	return mem
}

func registerMemory(t testing.TB, b *Backend, mem []byte, readOnly bool) *memory {
	t.Helper()
	m, err := b.Register(driver.Segment{Kind: driver.DRAM, Len: uint64(len(mem)), Mem: mem,
		ReadOnly: readOnly, Secret: [16]byte{1}})
	require.NoError(t, err)
	return m.(*memory)
}

// TestLargeMemoryIsFaultedIn has a stand-in that does not look at pages: those that are there
// were found by us. Nothing is written to, so 64 MiB cost their pages alone.
func TestLargeMemoryIsFaultedIn(t *testing.T) {
	f, open := standIn(t, 2)
	testkit.CheckLeaks(t, f.InUse)
	b, err := open(Config{})
	require.NoError(t, err)
	defer b.Close()
	b.faultThreads = 3
	mem := freshMemory(t, faultInMin)
	defer unix.Munmap(mem)
	mem[5<<20] = 7
	small := registerMemory(t, b, mem[:faultInMin-4096], false)
	if n := resident(t, mem); n > faultInMin/4096/4 {
		t.Errorf("%d pages of less than %d bytes were found beforehand", n, faultInMin)
	}
	if err := small.Revoke(t.Context()); err != nil {
		t.Error(err)
	}
	m := registerMemory(t, b, mem, false)
	if n := resident(t, mem); n != faultInMin/4096 {
		t.Errorf("%d of %d pages were found beforehand", n, faultInMin/4096)
	}
	if mem[5<<20] != 7 || bytes.Count(mem, []byte{0}) != faultInMin-1 {
		t.Error("the contents are other ones")
	}
	if err := m.Revoke(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestLargeMemoryThatIsReadOnly registers pages that the program may not write, with a
// stand-in that looks: it is pinned for reading alone, and peers read it.
func TestLargeMemoryThatIsReadOnly(t *testing.T) {
	f, open := standIn(t, 2)
	testkit.CheckLeaks(t, f.InUse)
	for i := range 2 {
		f.Device(i).Set("register_walks", 1)
	}
	p := &pair{outcomes: map[uint64]error{}}
	for i, b := range []**Backend{&p.near, &p.far} {
		var err error
		*b, err = open(Config{Devices: fmt.Sprintf("fake%d", i)})
		require.NoError(t, err)
		defer (*b).Close()
	}
	p.far.faultThreads = 3
	p.peer = p.connect(t)
	mem := freshMemory(t, faultInMin)
	defer unix.Munmap(mem)
	scribble(mem[1<<20:2<<20], 3)
	require.NoError(t, unix.Mprotect(mem, unix.PROT_READ))
	r, l := registerMemory(t, p.far, mem, true), register(t, p.near, 1<<20)
	if !r.pinned.readOnly {
		t.Error("pinned to be written to")
	}
	d := driver.Desc{Remote: 1 << 20, Len: 1 << 20, LocalKey: l.key, RemoteKey: p.imports(t, r)}
	if err := p.move(t, driver.Read, d); err != nil || !bytes.Equal(l.bytes, mem[1<<20:2<<20]) {
		t.Errorf("%v, the right bytes: %v", err, bytes.Equal(l.bytes, mem[1<<20:2<<20]))
	}
	if _, err := p.far.Register(driver.Segment{Kind: driver.DRAM, Len: faultInMin,
		Mem: mem}); err == nil {
		t.Error("registered for peers to write to")
	}
}

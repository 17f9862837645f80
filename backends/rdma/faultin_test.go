// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package rdma

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/fakeverbs"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

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
	leak.Check(t, f.InUse)
	b, err := open(Config{})
	require.NoError(t, err)
	defer b.Close()
	b.finders = 3
	mem := freshMemory(t, faultInMin)
	defer unix.Munmap(mem)
	mem[5<<20] = 7
	small := registerMemory(t, b, mem[:faultInMin-4096], false)
	if n := resident(t, mem); n > faultInMin/4096/4 {
		t.Errorf("%d pages of less than %d bytes were found beforehand", n, faultInMin)
	}
	if err := small.Revoke(context.Background()); err != nil {
		t.Error(err)
	}
	m := registerMemory(t, b, mem, false)
	if n := resident(t, mem); n != faultInMin/4096 {
		t.Errorf("%d of %d pages were found beforehand", n, faultInMin/4096)
	}
	if mem[5<<20] != 7 || bytes.Count(mem, []byte{0}) != faultInMin-1 {
		t.Error("the contents are other ones")
	}
	if err := m.Revoke(context.Background()); err != nil {
		t.Error(err)
	}
}

// TestLargeMemoryThatIsReadOnly registers pages that the program may not write, with a
// stand-in that looks: it is pinned for reading alone, and peers read it.
func TestLargeMemoryThatIsReadOnly(t *testing.T) {
	f, open := standIn(t, 2)
	leak.Check(t, f.InUse)
	for i := range 2 {
		f.Device(i).Set(fakeverbs.RegisterWalks, 1)
	}
	p := &pair{outcomes: map[uint64]error{}}
	for i, b := range []**Backend{&p.near, &p.far} {
		var err error
		*b, err = open(Config{Devices: fmt.Sprintf("fake%d", i)})
		require.NoError(t, err)
		defer (*b).Close()
	}
	p.far.finders = 3
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

// BenchmarkRegister is what the first registration of 1 GiB costs, over a stand-in that
// finds the pages as a kernel does; with one thread nobody else does. Memory that is
// resident shows what the look beforehand costs in vain.
func BenchmarkRegister(b *testing.B) {
	const n = 1 << 30
	f, open := standIn(b, 1)
	f.Device(0).Set(fakeverbs.RegisterWalks, 1)
	backend, err := open(Config{})
	if err != nil {
		b.Fatal(err)
	}
	defer backend.Close()
	many := min(runtime.GOMAXPROCS(0), findersMax)
	for _, c := range []struct {
		name     string
		advice   int
		resident bool
	}{{"fresh,base", unix.MADV_NOHUGEPAGE, false}, {"fresh,huge", unix.MADV_HUGEPAGE, false},
		{"resident,base", unix.MADV_NOHUGEPAGE, true}} {
		for _, threads := range []int{1, many} {
			b.Run(fmt.Sprintf("%s/threads=%d", c.name, threads), func(b *testing.B) {
				backend.finders = threads
				b.SetBytes(n)
				for b.Loop() {
					b.StopTimer()
					mem := freshMemory(b, n)
					_ = unix.Madvise(mem, c.advice)
					if c.resident {
						_ = unix.Madvise(mem, unix.MADV_POPULATE_WRITE)
					}
					b.StartTimer()
					m := registerMemory(b, backend, mem, false)
					b.StopTimer()
					err := errors.Join(m.Revoke(context.Background()), unix.Munmap(mem))
					if err != nil {
						b.Fatal(err)
					}
					b.StartTimer()
				}
			})
		}
	}
}

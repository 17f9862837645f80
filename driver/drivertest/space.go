// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"errors"
	"fmt"
	"io"
	"syscall"
	"testing"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// Allocator makes memory of the kind under test: n bytes, zeroed.
type Allocator func(n uint64) (*Space, error)

// Space is memory to be registered, with a way to its bytes that is not the
// backend's.
type Space struct {
	Segment driver.Segment // without a Secret: the suite draws one for each registration
	Bytes   Bytes          // nil: Segment.Mem
	Free    func() error   // may be nil

	spoil func() error // of decaying
}

// Bytes looks into memory and changes it, as the program that owns it would.
type Bytes interface {
	io.ReaderAt
	io.WriterAt
}

// HostMemory makes memory that other processes can map (package hostmem).
func HostMemory(n uint64) (*Space, error) {
	buf, err := hostmem.Alloc(n, hostmem.Options{Purpose: "drivertest"})
	if err != nil {
		return nil, err
	}
	return &Space{Segment: buf.Segment(), Free: buf.Close}, nil
}

// PopulatedMemory is HostMemory whose pages are all there from the start, huge
// where the kernel has such: what a pool of KV blocks is, and what benchmarks use.
func PopulatedMemory(n uint64) (*Space, error) {
	buf, err := hostmem.Alloc(n, hostmem.Options{Purpose: "drivertest", Populate: true})
	if err != nil {
		return nil, err
	}
	return &Space{Segment: buf.Segment(), Free: buf.Close}, nil
}

// ForeignMemory makes memory outside the Go heap that only this process has:
// Segment.Shared is nil.
func ForeignMemory(n uint64) (*Space, error) {
	mem, err := mapAnonymous(n)
	if err != nil {
		return nil, err
	}
	seg := driver.Segment{Kind: driver.DRAM, Len: n, Mem: mem}
	return &Space{Segment: seg, Free: func() error { return syscall.Munmap(mem) }}, nil
}

func mapAnonymous(n uint64) ([]byte, error) {
	const prot, flags = syscall.PROT_READ | syscall.PROT_WRITE, syscall.MAP_PRIVATE |
		syscall.MAP_ANON
	mem, err := syscall.Mmap(-1, 0, int(n), prot, flags)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", n, err)
	}
	return mem, nil
}

// model makes bytes to compare with. They lie outside the Go heap, where the
// race detector does not follow each of them.
func model(tb testing.TB, n uint64) []byte {
	tb.Helper()
	mem, err := mapAnonymous(n)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = errands.afterwards(func() error { return syscall.Munmap(mem) }) })
	return mem
}

// view returns the bytes of a range, without a copy where they are mapped.
func (s *Space) view(off, n uint64) ([]byte, error) {
	if m, ok := s.bytes().(mapped); ok && off+n <= uint64(len(m)) {
		return m[off : off+n], nil
	}
	p := make([]byte, n)
	_, err := s.bytes().ReadAt(p, int64(off))
	return p, err
}

func (s *Space) bytes() Bytes {
	if s.Bytes == nil {
		return mapped(s.Segment.Mem)
	}
	return s.Bytes
}

// free gives the memory back. A second call does nothing.
func (s *Space) free() error {
	free := s.Free
	s.Free = nil
	if free == nil {
		return nil
	}
	return free()
}

var errPastEnd = errors.New("drivertest: past the end of the memory")

// mapped is Bytes over a mapping.
type mapped []byte

func (m mapped) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 || off+int64(len(p)) > int64(len(m)) {
		return 0, errPastEnd
	}
	return copy(p, m[off:]), nil
}

func (m mapped) WriteAt(p []byte, off int64) (int, error) {
	if off < 0 || off+int64(len(p)) > int64(len(m)) {
		return 0, errPastEnd
	}
	return copy(m[off:], p), nil
}

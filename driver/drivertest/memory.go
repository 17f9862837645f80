// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"reflect"
	"syscall"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// Allocator makes memory of the kind under test: n bytes.
type Allocator func(n uint64) (*Space, error)

// Space is memory to be registered, with a way to its bytes that is not the backend's.
type Space struct {
	Segment driver.Segment // without a Secret: the suite draws one for each registration
	Bytes   Bytes          // nil: Segment.Mem
	Free    func() error   // may be nil

	spoil func() error // of spoilable memory
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

// ForeignMemory makes memory outside the Go heap that only this process has: Segment.Shared is nil.
func ForeignMemory(n uint64) (*Space, error) {
	mem, err := syscall.Mmap(-1, 0, int(n), syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", n, err)
	}
	return &Space{Segment: driver.Segment{Kind: driver.DRAM, Len: n, Mem: mem},
		Free: func() error { return syscall.Munmap(mem) }}, nil
}

// FileMemory makes memory that is a range of a new file in a directory. The file has its name until
// the memory is freed: NVIDIA's libcufile opens it anew. off says how the range is aligned.
func FileMemory(dir string, off uint64) Allocator {
	return func(n uint64) (*Space, error) {
		f, err := os.CreateTemp(dir, "drivertest")
		if err != nil {
			return nil, err
		}
		free := func() error { return errors.Join(os.Remove(f.Name()), f.Close()) }
		if err := f.Truncate(int64(off + n + 4096)); err != nil {
			return nil, errors.Join(err, free())
		}
		return FileSpace(f, off, n, free), nil
	}
}

// FileSpace is memory that is a range of a file.
func FileSpace(f *os.File, off, n uint64, free func() error) *Space {
	return &Space{
		Segment: driver.Segment{Kind: driver.File, Len: n, FD: int(f.Fd()), FileOff: off},
		Bytes: struct {
			io.ReaderAt
			io.WriterAt
		}{io.NewSectionReader(f, int64(off), int64(n)), io.NewOffsetWriter(f, int64(off))},
		Free: free,
	}
}

// Card is the test's own way to memory of a device, which is not the backend's.
type Card interface {
	Alloc(n uint64) (at uint64, err error)
	Free(at uint64) error
	Read(to []byte, from uint64) error
	Write(to uint64, from []byte) error
}

// HBM makes memory of the device with that number.
func HBM(c Card, ordinal int, n uint64) (*Space, error) {
	at, err := c.Alloc(n)
	if err != nil {
		return nil, err
	}
	seg := driver.Segment{Kind: driver.HBM, Len: n, Addr: at, Device: ordinal}
	return &Space{Segment: seg, Bytes: CardBytes{c, at, n},
		Free: func() error { return c.Free(at) }}, nil
}

// CardBytes is Bytes over memory of a device.
type CardBytes struct {
	Card    Card
	At, Len uint64
}

// ReadAt implements io.ReaderAt.
func (b CardBytes) ReadAt(p []byte, off int64) (int, error) {
	return b.at(p, off, func(at uint64) error { return b.Card.Read(p, at) })
}

// WriteAt implements io.WriterAt.
func (b CardBytes) WriteAt(p []byte, off int64) (int, error) {
	return b.at(p, off, func(at uint64) error { return b.Card.Write(at, p) })
}

func (b CardBytes) at(p []byte, off int64, f func(at uint64) error) (int, error) {
	if off < 0 || uint64(off)+uint64(len(p)) > b.Len {
		return 0, errors.New("drivertest: past the end of the memory")
	}
	if len(p) == 0 {
		return 0, nil
	}
	return len(p), f(b.At + uint64(off))
}

// addr is where the memory is mapped, or 0.
func (s *Space) addr() uintptr {
	if s.Bytes != nil {
		return 0
	}
	return reflect.ValueOf(s.Segment.Mem).Pointer()
}

// get returns bytes of the memory, a copy where they are not mapped: mapped ones may change.
func (s *Space) get(off, n uint64) ([]byte, error) {
	if s.Bytes == nil {
		return s.Segment.Mem[off:][:n], nil
	}
	p := make([]byte, n)
	_, err := s.Bytes.ReadAt(p, int64(off))
	return p, err
}

// set writes bytes as the owner of the memory does.
func (s *Space) set(off uint64, p []byte) error {
	if s.Bytes == nil {
		copy(s.Segment.Mem[off:][:len(p)], p)
		return nil
	}
	_, err := s.Bytes.WriteAt(p, int64(off))
	return err
}

// pattern fills p with bytes that depend on seed and position, so that a range that landed
// elsewhere, twice, or half differs from what was expected.
//
//go:norace
func pattern(p []byte, seed uint64) []byte {
	whole, x := p, seed*0x9e3779b97f4a7c15+1
	for ; len(p) >= 8; p = p[8:] {
		x ^= x << 13 // a step of Marsaglia's xorshift
		x ^= x >> 7
		x ^= x << 17
		binary.LittleEndian.PutUint64(p, x)
	}
	for i := range p {
		p[i] = byte(x >> (8*i + 3))
	}
	return whole
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sum is a CRC-32C: processors have an instruction for it, and no backend forges bytes.
func sum(p []byte) uint32 { return crc32.Checksum(p, castagnoli) }

// difference says where got departs from want.
func difference(got, want []byte) string {
	first, last, count := -1, 0, 0
	for i := range want {
		if i >= len(got) || got[i] != want[i] {
			if first < 0 {
				first = i
			}
			last = i
			count++
		}
	}
	if first < 0 {
		return "no difference now: the bytes changed while they were compared"
	}
	return fmt.Sprintf("%d bytes differ between %d and %d (got %x.., want %x..)", count, first,
		last, head(got[min(first, len(got)):]), head(want[first:]))
}

func head(p []byte) []byte { return p[:min(8, len(p))] }

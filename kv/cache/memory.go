// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/proc"
)

// The memory file, in the byte order of the machine:
//
//	0        header: magic, version, shape, id, boot, the process that has it, CRC-32C
//	4 KiB    names of namespaces, spaceBytes each
//	table    an entry for each block that the cache can know, and behind them their stamps: the
//	         second of the cache's clock in which each was used last
//	data     extents
//
// The file is mapped and lives as long as the host runs, so what a store of the processor has put
// there a process finds after any kill. A loss of power ends it: the boot is not the same then.
const (
	memoryMagic   = "sluiceKC"
	memoryVersion = 2
	spacesMax     = 1 << 10
	spaceBytes    = 256
	orderMark     = 0x0102030405060708
	atPID         = 120 // the process that has it, written at each open, behind the CRC
	atStart       = 128
)

// memory is the mapped file.
type memory struct {
	header
	f       *os.File
	mapped  []byte
	seed    uint32 // of the sums of records: that of the id
	entries []entry
	stamps  []uint32 // of the entries; each is guarded by its entry's shard
	data    []byte
	found   string // why the content of the file was not used; empty: it was, or there was none
	made    bool   // there was no file

	basePages bool // it is new, and not all of it got huge pages
}

// openMemory attaches to the file at a path, or makes it. It waits until ctx ends for a process
// that has it and is about to end. A file whose content is of no use here is made anew, and found
// says why: it is a cache.
func openMemory(ctx context.Context, path string, s shape) (_ *memory, err error) {
	f, made, err := openOwn(ctx, path, livingOwner)
	if err != nil {
		return nil, fmt.Errorf("open the memory file: %w", err)
	}
	s.table, s.each = headerBytes+spacesMax*spaceBytes, entryBytes+stampBytes
	m := &memory{f: f, made: made, header: header{magic: memoryMagic, version: memoryVersion,
		shape: s}}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("memory file %s: %w", path, err), m.close(true))
		}
	}()
	binary.NativeEndian.PutUint64(m.machine[:], orderMark)
	binary.NativeEndian.PutUint64(m.machine[8:], uint64(os.Getpagesize()))
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, err
	}
	m.boot = strings.TrimSpace(string(boot))
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() > 0 {
		if _, m.found, err = m.check(f); err != nil {
			return nil, err
		}
	}
	old := info.Size() > 0 && m.found == ""
	if !old {
		// before what is there goes, and before huge pages take all that there is
		if err := hasRoom(f, m.fileBytes()); err != nil {
			return nil, err
		}
		// also where it is large enough: what lies there is not to be taken for anything
		if err := f.Truncate(0); err != nil {
			return nil, err
		}
	}
	if err := m.reserve(ctx, old); err != nil {
		return nil, err
	}
	table := m.mapped[m.table:]
	m.entries = asEntries(table[:m.shape.entries*entryBytes])
	m.stamps = asStamps(table[m.shape.entries*entryBytes:][:m.shape.entries*stampBytes])
	m.data = m.mapped[m.dataOff():]
	if !old {
		m.id = newID()
		copy(m.mapped, m.encode())
	}
	m.seed = crc32.Checksum(m.id[:], castagnoli)
	start, err := proc.StartOf(os.Getpid())
	if err != nil {
		return nil, err
	}
	binary.NativeEndian.PutUint64(m.mapped[atPID:], uint64(os.Getpid()))
	binary.NativeEndian.PutUint64(m.mapped[atStart:], start)
	return m, nil
}

// livingOwner is the process that the header names, where it is not this one and has not ended as a
// whole; else 0. The kernel gives the lock back as it ends, and may have requests of it under way
// still, which write to the memory.
func livingOwner(f *os.File) int {
	var p [16]byte
	if _, err := f.ReadAt(p[:], atPID); err != nil {
		return 0 // a new file
	}
	pid, start := binary.NativeEndian.Uint64(p[:]), binary.NativeEndian.Uint64(p[8:])
	if pid == 0 || pid > math.MaxInt32 || int(pid) == os.Getpid() {
		return 0
	}
	if now, ended, err := proc.StateOf(int(pid)); err != nil || now != start || ended {
		return 0
	}
	return int(pid)
}

// gatherStep is how much is gathered between two looks at a context.
const gatherStep = 1 << 30

// reserve has the file as long as it must be, and maps it, with memory for all of it: without, a
// store into a page that the kernel cannot find would end the process. A new one gets huge pages
// where there are some, until ctx ends: disks read into them at twice the rate.
func (m *memory) reserve(ctx context.Context, old bool) error {
	n := m.fileBytes()
	if err := m.f.Truncate(int64(n)); err != nil {
		return err
	}
	mapped, err := hostmem.Reserve(n, hostmem.HugeSize)
	if err != nil {
		return err
	}
	if err := hostmem.Place(mapped, int(m.f.Fd()), 0); err != nil {
		return errors.Join(err, hostmem.Unmap(mapped))
	}
	m.mapped = mapped
	_ = unix.Madvise(mapped, unix.MADV_HUGEPAGE)
	if old {
		return nil
	}
	rest := mapped
	for len(rest) > 0 && ctx.Err() == nil &&
		hostmem.Gather(rest[:min(len(rest), gatherStep)], runtime.GOMAXPROCS(0)) {
		rest = rest[min(len(rest), gatherStep):]
	}
	var fs unix.Statfs_t // the pages of a hugetlbfs are huge in any case
	m.basePages = len(rest) > 0 && unix.Fstatfs(int(m.f.Fd()), &fs) == nil &&
		fs.Bsize < hostmem.HugeSize
	if err := reserveBytes(m.f, n); err != nil {
		return errors.Join(err, m.f.Truncate(0))
	}
	return nil
}

// sumOf is the CRC of a record: of the fields that outlive a process, its place in the table, and
// the file. It is never 0.
func (m *memory) sumOf(i uint32, e *entry) uint32 {
	before, behind := e.recorded()
	sum := crc32.Update(m.seed^i, castagnoli, before)
	return max(1, crc32.Update(sum, castagnoli, behind))
}

// close keeps the file, but one that Open has made and not opened.
func (m *memory) close(failed bool) error {
	var err error
	if m.mapped != nil {
		if m.entries != nil {
			binary.NativeEndian.PutUint64(m.mapped[atPID:], 0) // it has nothing under way
		}
		err = hostmem.Unmap(m.mapped)
		m.mapped = nil
	}
	return errors.Join(err, closeOwn(m.f, failed && m.made))
}

// bytesOf returns the bytes of a slot.
func (m *memory) bytesOf(slot, size uint32) []byte {
	return m.data[uint64(slot)*granule:][:size:size]
}

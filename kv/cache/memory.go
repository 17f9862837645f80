// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"os"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/engine"
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
	headerBytes   = 4 << 10
	spacesMax     = 1 << 10
	spaceBytes    = 256
	tableOff      = headerBytes + spacesMax*spaceBytes
	dataAlign     = 2 << 20
	orderMark     = 0x0102030405060708
)

// shape is what must be the same for a file to be attached to.
type shape struct {
	entries uint64 // of the table
	extent  uint64 // bytes
	bytes   uint64 // of data

	kept bool // a file that has another number of entries is attached to as well, and keeps it
}

func (s *shape) dataOff() uint64 {
	return (tableOff + s.entries*(entryBytes+stampBytes) + dataAlign - 1) &^ (dataAlign - 1)
}

func (s *shape) fileBytes() uint64 { return s.dataOff() + s.bytes }

// memory is the mapped file.
type memory struct {
	f       *os.File
	mapped  []byte
	id      [16]byte
	seed    uint32 // of the sums of records: that of the id
	shape   shape
	entries []entry
	stamps  []uint32 // of the entries; each is guarded by its entry's shard
	data    []byte
	found   string // why the content of the file was not used; empty: it was, or there was none
	old     bool   // the content is of a process before

	basePages bool // it is new, and not all of it got huge pages
}

// header fields, by offset
const (
	atVersion = 8
	atOrder   = 16
	atPage    = 24
	atEntries = 32
	atExtent  = 40
	atBytes   = 48
	atID      = 56
	atBoot    = 72 // 40 bytes
	atSum     = 112
	atPID     = 120 // written at each open, behind the CRC
	atStart   = 128
)

// openMemory attaches to the file at a path, or makes it. It waits until ctx ends for a process
// that has it and is about to end. A file whose content is of no use here is made anew, and found
// says why: it is a cache.
func openMemory(ctx context.Context, path string, s shape) (_ *memory, err error) {
	f, err := openOwn(path)
	if err != nil {
		return nil, fmt.Errorf("open the memory file: %w", err)
	}
	m := &memory{f: f, shape: s}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("memory file %s: %w", path, err), m.close())
		}
	}()
	if err := lock(ctx, f, m.ownerLives); err != nil {
		return nil, err
	}
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() > 0 {
		m.found, err = m.check(uint64(info.Size()), boot)
		if err != nil {
			return nil, err
		}
		m.old = m.found == ""
	}
	if !m.old {
		// also where it is large enough: what lies there is not to be taken for anything
		if err := f.Truncate(0); err != nil {
			return nil, err
		}
	}
	if err := m.reserve(ctx); err != nil {
		return nil, err
	}
	s = m.shape
	m.entries = asEntries(m.mapped[tableOff:][:s.entries*entryBytes])
	m.stamps = asStamps(m.mapped[tableOff+s.entries*entryBytes:][:s.entries*stampBytes])
	m.data = m.mapped[s.dataOff():]
	if m.old {
		copy(m.id[:], m.mapped[atID:])
	} else {
		m.begin(boot)
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

// openOwn opens or makes a file that nobody else may write to: a folder such as /dev/shm is
// everybody's.
func openOwn(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Mode&0o022 != 0 || int(st.Uid) != os.Geteuid() {
		return nil, errors.Join(fmt.Errorf("%s is no regular file of this user that nobody else "+
			"may write to: remove it, or name another path", path), f.Close())
	}
	return f, nil
}

// lock takes a file for this process, and waits until ctx ends for one that has it and may be about
// to end. held says what else must be over.
func lock(ctx context.Context, f *os.File, held func() bool) error {
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err != nil && !errors.Is(err, unix.EWOULDBLOCK) {
			return os.NewSyscallError("flock", err)
		}
		if err == nil && !held() {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("another cache has it, of this process or of one that has not "+
				"ended: %w", errors.Join(engine.ErrBusy,
				context.Cause(ctx)))
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// ownerLives reports whether the process that the header names is not this one and has not ended as
// a whole. The kernel gives the lock back as it ends, and may have requests of it under way still,
// which write to the memory.
func (m *memory) ownerLives() bool {
	var p [16]byte
	if _, err := m.f.ReadAt(p[:], atPID); err != nil {
		return false // a new file
	}
	pid, start := binary.NativeEndian.Uint64(p[:]), binary.NativeEndian.Uint64(p[8:])
	if pid == 0 || pid > math.MaxInt32 || int(pid) == os.Getpid() {
		return false
	}
	now, ended, err := proc.StateOf(int(pid))
	return err == nil && now == start && !ended
}

// check reports why the content of a file is of no use: empty if it is.
func (m *memory) check(size uint64, boot string) (why string, err error) {
	h := make([]byte, headerBytes)
	if _, err := m.f.ReadAt(h, 0); err != nil && err != io.EOF {
		return "", err
	}
	s := shape{entries: binary.NativeEndian.Uint64(h[atEntries:]),
		extent: binary.NativeEndian.Uint64(h[atExtent:]),
		bytes:  binary.NativeEndian.Uint64(h[atBytes:])}
	want := m.shape
	if want.kept {
		want.entries, want.kept = s.entries, false
	}
	u64 := func(at int) uint64 { return binary.NativeEndian.Uint64(h[at:]) }
	if string(h[:8]) != memoryMagic {
		blank, err := isBlank(m.f) // the header is written last
		if blank {
			return "the process that made it did not finish", nil
		}
		return "", errors.Join(fmt.Errorf("it is no memory file of a cache; name another path, "+
			"or remove it: %w", engine.ErrCorrupt), err)
	}
	switch {
	case size < headerBytes:
		return "it is shorter than a header", nil
	case u64(atOrder) != orderMark:
		return "a machine of another byte order wrote it", nil
	case u64(atVersion) != memoryVersion:
		return fmt.Sprintf("it has version %d, this program knows %d", u64(atVersion),
			memoryVersion), nil
	case crc32.Checksum(h[:atSum], castagnoli) != binary.NativeEndian.Uint32(h[atSum:]):
		return "its header is damaged", nil
	case u64(atPage) != uint64(os.Getpagesize()):
		return fmt.Sprintf("it is for pages of %d bytes", u64(atPage)), nil
	case strings.TrimRight(string(h[atBoot:atSum]), "\x00") != boot:
		return "it is from before the host was booted", nil
	case s != want:
		return fmt.Sprintf("it has %d entries and %d bytes in extents of %d, asked for are now "+
			"%d, %d and %d: to keep it, have Config say Blocks, Bytes and Extent as before",
			s.entries, s.bytes, s.extent, m.shape.entries, m.shape.bytes, m.shape.extent), nil
	case size < s.fileBytes():
		return "it was cut", nil
	}
	m.shape = want
	return "", nil
}

// isBlank reports whether there is nothing in all of a file: it was to become one of a cache. An
// image of a disk may begin with many zeros.
func isBlank(f *os.File) (bool, error) {
	p := make([]byte, 1<<20)
	for end := int64(0); ; {
		at, err := unix.Seek(int(f.Fd()), end, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) { // nothing but holes
			return true, nil
		}
		if err != nil {
			return false, os.NewSyscallError("lseek", err)
		}
		n, err := f.ReadAt(p, at)
		if len(bytes.TrimLeft(p[:n], "\x00")) > 0 || err != nil && err != io.EOF {
			return false, err
		}
		end = at + int64(n)
	}
}

// gatherStep is how much is gathered between two looks at a context.
const gatherStep = 1 << 30

// reserve has the file as long as it must be, and maps it, with memory for all of it: without, a
// store into a page that the kernel cannot find would end the process. A new one gets huge pages
// where there are some, until ctx ends: disks read into them at twice the rate.
func (m *memory) reserve(ctx context.Context) error {
	n := int64(m.shape.fileBytes())
	if err := m.f.Truncate(n); err != nil {
		return err
	}
	mapped, err := hostmem.Reserve(uint64(n), hostmem.HugeSize)
	if err != nil {
		return err
	}
	if err := hostmem.Place(mapped, int(m.f.Fd()), 0); err != nil {
		return errors.Join(err, hostmem.Unmap(mapped))
	}
	m.mapped = mapped
	_ = unix.Madvise(mapped, unix.MADV_HUGEPAGE)
	if m.old {
		return nil
	}
	// What its filesystem has no room for is refused before any page of it is there.
	var free unix.Statfs_t
	err = os.NewSyscallError("fstatfs", unix.Fstatfs(int(m.f.Fd()), &free))
	room := free.Bavail * uint64(free.Bsize)
	if err == nil && free.Blocks > 0 && room < uint64(n) {
		err = os.NewSyscallError("fallocate", unix.ENOSPC)
	}
	rest := mapped
	for len(rest) > 0 && errors.Join(err, ctx.Err()) == nil &&
		hostmem.Gather(rest[:min(len(rest), gatherStep)], runtime.GOMAXPROCS(0)) {
		rest = rest[min(len(rest), gatherStep):]
	}
	m.basePages = len(rest) > 0 && free.Bsize < hostmem.HugeSize // which a hugetlbfs has
	for retry := err == nil; retry; retry = errors.Is(err, unix.EINTR) {
		err = os.NewSyscallError("fallocate", unix.Fallocate(int(m.f.Fd()), 0, 0, n))
	}
	if err == nil {
		return nil
	}
	m.mapped = nil // a store into what is cut off would end the process
	return fmt.Errorf("it takes %d bytes, its filesystem has %d free; make the tier smaller "+
		"or the filesystem larger: %w", n, room, errors.Join(err, hostmem.Unmap(mapped),
		m.f.Truncate(0)))
}

// begin writes the header of an empty file.
func (m *memory) begin(boot string) {
	h := m.mapped[:headerBytes]
	copy(h, memoryMagic)
	put := func(at int, v uint64) { binary.NativeEndian.PutUint64(h[at:], v) }
	put(atVersion, memoryVersion)
	put(atOrder, orderMark)
	put(atPage, uint64(os.Getpagesize()))
	put(atEntries, m.shape.entries)
	put(atExtent, m.shape.extent)
	put(atBytes, m.shape.bytes)
	m.id = newID()
	copy(h[atID:], m.id[:])
	copy(h[atBoot:atSum], boot)
	binary.NativeEndian.PutUint32(h[atSum:], crc32.Checksum(h[:atSum], castagnoli))
}

// sumOf is the CRC of a record: of the fields that outlive a process, its place in the table, and
// the file. It is never 0.
func (m *memory) sumOf(i uint32, e *entry) uint32 {
	before, behind := e.recorded()
	sum := crc32.Update(m.seed^i, castagnoli, before)
	return max(1, crc32.Update(sum, castagnoli, behind))
}

func (m *memory) close() error {
	var err error
	if m.mapped != nil {
		binary.NativeEndian.PutUint64(m.mapped[atPID:], 0) // it has nothing under way
		err = hostmem.Unmap(m.mapped)
		m.mapped = nil
	}
	return errors.Join(err, m.f.Close())
}

// bytesOf returns the bytes of a slot.
func (m *memory) bytesOf(slot, size uint32) []byte {
	return m.data[uint64(slot)*granule:][:size:size]
}

func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(b)), err
}

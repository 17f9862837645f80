// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/proc"
)

// The file of a tier begins with a header, in little-endian: magic, version, machine, shape, id,
// boot, CRC-32C. The fields by offset:
const (
	atVersion = 8
	atMachine = 16 // 16 bytes; of a disk: zeros
	atEntries = 32
	atExtent  = 40
	atBytes   = 48
	atID      = 56
	atBoot    = 72 // 40 bytes; of a disk: zeros
	atSum     = 112

	headerBytes = 4 << 10
	dataAlign   = 2 << 20
)

// shape is what must be the same for a file to be used again.
type shape struct {
	entries uint64 // of the table
	extent  uint64 // bytes
	bytes   uint64 // of data

	kept  bool // a file that has another number of entries keeps it
	grows bool // a file with fewer bytes gets more

	table, each uint64 // of the tier: where the table begins, and bytes of an entry
}

func (s *shape) dataOff() uint64 {
	return (s.table + s.entries*s.each + dataAlign - 1) &^ (dataAlign - 1)
}

func (s *shape) fileBytes() uint64 { return s.dataOff() + s.bytes }

// header is what the files of a tier say of themselves.
type header struct {
	magic   string
	version uint64
	machine [16]byte // order of bytes, and size of pages, where that matters
	boot    string   // where the file ends with it
	id      [16]byte
	shape
}

func (h *header) encode() []byte {
	p := make([]byte, atSum+4)
	copy(p, h.magic)
	copy(p[atMachine:], h.machine[:])
	for at, v := range map[int]uint64{atVersion: h.version, atEntries: h.entries,
		atExtent: h.extent, atBytes: h.bytes} {
		binary.LittleEndian.PutUint64(p[at:], v)
	}
	copy(p[atID:], h.id[:])
	copy(p[atBoot:atSum], h.boot)
	binary.LittleEndian.PutUint32(p[atSum:], crc32.Checksum(p[:atSum], castagnoli))
	return p
}

// check reports why the content of a file of a tier is of no use: empty if it is. Then h has its id
// and its number of entries, and had is how many bytes of data it has. One that is of something
// else is an error.
func (h *header) check(f *os.File) (had uint64, why string, err error) {
	info, err := f.Stat()
	if err != nil {
		return 0, "", err
	}
	p := make([]byte, headerBytes)
	if _, err := f.ReadAt(p, 0); err != nil && err != io.EOF {
		return 0, "", err
	}
	if string(p[:len(h.magic)]) != h.magic {
		blank, err := isBlank(f) // the header of a memory file is written last
		if blank {
			return 0, "the process that made it did not finish", nil
		}
		return 0, "", errors.Join(fmt.Errorf("it is no file of a cache for this tier; name "+
			"another path, or remove it: %w", engine.ErrCorrupt), err)
	}
	u64 := func(at int) uint64 { return binary.LittleEndian.Uint64(p[at:]) }
	s := shape{entries: u64(atEntries), extent: u64(atExtent), bytes: u64(atBytes)}
	same := s.extent == h.extent && (s.bytes == h.bytes || h.grows && s.bytes < h.bytes) &&
		(s.entries == h.entries || h.kept)
	switch {
	case h.magic == diskMagic && h.version == diskVersion && u64(atVersion) == sealedVersion:
		return 0, "its blocks are sealed, and no keys are given", nil
	case h.magic == diskMagic && h.version == sealedVersion && u64(atVersion) == diskVersion:
		return 0, "its blocks are not sealed, and keys are given", nil
	case u64(atVersion) != h.version:
		return 0, fmt.Sprintf("it has version %d, this program knows %d", u64(atVersion),
			h.version), nil
	case string(p[atMachine:atEntries]) != string(h.machine[:]):
		return 0, "a machine of another byte order, or with pages of another size, wrote it", nil
	case crc32.Checksum(p[:atSum], castagnoli) != binary.LittleEndian.Uint32(p[atSum:]):
		return 0, "its header is damaged, or the process that made it did not finish", nil
	case strings.TrimRight(string(p[atBoot:atSum]), "\x00") != h.boot:
		return 0, "it is from before the host was booted", nil
	case !same:
		text := "it is kept only where its shape stays as it was:"
		for _, part := range []struct {
			name     string
			was, now uint64
		}{{"bytes", s.bytes, h.bytes}, {"extent", s.extent, h.extent},
			{"entries for blocks", s.entries, h.entries}} {
			if part.was != part.now {
				text += fmt.Sprintf(" %s, %d before, %d now;", part.name, part.was, part.now)
			}
		}
		return 0, strings.TrimSuffix(text, ";"), nil
	}
	s.table, s.each = h.table, h.each
	if uint64(info.Size()) < s.fileBytes() {
		return 0, "it was cut", nil
	}
	copy(h.id[:], p[atID:])
	h.entries = s.entries
	return s.bytes, "", nil
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

// lockOrder is the order in which processes take the files of disks, whatever that of their configs
// is, so that two do not wait for each other: by their real paths, and the memory file behind them.
func (cfg *Config) lockOrder() (disks []int, err error) {
	real := func(path string) string {
		if abs, err := filepath.Abs(path); err == nil {
			path = abs
		}
		if dir, err := filepath.EvalSymlinks(filepath.Dir(path)); err == nil { // else Open fails
			path = filepath.Join(dir, filepath.Base(path))
		}
		return path
	}
	paths := map[string]string{real(cfg.Memory.Path): cfg.Memory.Path}
	var order []string
	numbers := map[string]int{}
	for k, d := range cfg.Disks {
		path := real(d.Path)
		if other, twice := paths[path]; twice {
			return nil, fmt.Errorf("disk %s is the file %s: %w", d.Path, other, engine.ErrBounds)
		}
		paths[path], numbers[path] = d.Path, k
		order = append(order, path)
	}
	slices.Sort(order)
	for _, path := range order {
		disks = append(disks, numbers[path])
	}
	return disks, nil
}

// openOwn opens or makes a file that nobody else may write to: a folder such as /dev/shm is
// everybody's. It takes the file for this process, and waits until ctx ends for one that has it and
// may be about to end. held is another process that has it without the lock; 0: none has.
func openOwn(ctx context.Context, path string, held func(*os.File) (pid int)) (f *os.File,
	made bool, err error) {
	f, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if made = err == nil; errors.Is(err, fs.ErrExist) {
		f, err = os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	}
	if err != nil {
		return nil, false, err
	}
	var st unix.Stat_t
	for err = unix.Fstat(int(f.Fd()), &st); err == nil; {
		if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Mode&0o022 != 0 ||
			int(st.Uid) != os.Geteuid() {
			err = fmt.Errorf("%s is no regular file of this user that nobody else may write to: "+
				"remove it, or name another path", path)
			break
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err != nil && !errors.Is(err, unix.EWOULDBLOCK) {
			err = os.NewSyscallError("flock", err)
			break
		}
		holder := 0
		if err == nil {
			holder = held(f)
		}
		if err == nil && holder == 0 {
			if err = unix.Fstat(int(f.Fd()), &st); err == nil && st.Nlink == 0 {
				err = fmt.Errorf("%s was removed meanwhile: try again", path)
			}
			made = made && st.Size == 0 // another process may have had it since
			break
		}
		select {
		case <-ctx.Done():
			who := "a process that /proc does not show"
			if holder = cmp.Or(holder, proc.LockedBy(path)); holder > 0 {
				who = fmt.Sprintf("process %d", holder)
			}
			err = fmt.Errorf("another cache has it, of %s: %w", who,
				errors.Join(engine.ErrBusy, context.Cause(ctx)))
		case <-time.After(5 * time.Millisecond):
			err = nil
		}
	}
	if err != nil {
		return nil, false, errors.Join(err, f.Close())
	}
	return f, made, nil
}

// reserveBytes has a file with so many bytes, all of which its filesystem has.
func reserveBytes(f *os.File, n uint64) error {
	if err := hasRoom(f, n); err != nil {
		return err
	}
	err := unix.EINTR
	for err == unix.EINTR {
		err, _ = unix.Fallocate(int(f.Fd()), 0, 0, int64(n)).(unix.Errno)
	}
	if err != 0 {
		return fmt.Errorf("reserve %d bytes: %w", n, os.NewSyscallError("fallocate", err))
	}
	return nil
}

// hasRoom is an error where a file cannot have so many bytes: the kernel would fill the filesystem
// before it says so.
func hasRoom(f *os.File, n uint64) error {
	var has unix.Stat_t
	var room unix.Statfs_t
	if err := errors.Join(unix.Fstat(int(f.Fd()), &has),
		unix.Fstatfs(int(f.Fd()), &room)); err != nil {
		return err
	}
	free := room.Bavail * uint64(room.Bsize)
	if room.Blocks > 0 && n > free+uint64(has.Blocks)*512 { // no blocks: there is no bound
		return fmt.Errorf("reserve %d bytes, of which its filesystem has %d free; make the tier "+
			"smaller or the filesystem larger: %w", n, free, unix.ENOSPC)
	}
	return nil
}

// closeOwn closes a file, which another process may take then, or removes it, unless another file
// has its name by now.
func closeOwn(f *os.File, remove bool) error {
	var err error
	if remove {
		ours, _ := f.Stat()
		named, _ := os.Lstat(f.Name())
		if os.SameFile(ours, named) {
			err = os.Remove(f.Name())
		}
	}
	return errors.Join(err, f.Close())
}

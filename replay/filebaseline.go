// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/kv/store"
)

// fileBaseline moves the same blocks by pread and pwrite: by several threads, in pieces, past
// the page cache for whole pages where the filesystem lets it, as the backend does. It reads
// from the store and writes to a file of its own without a name, so that nothing that it does
// can stand in for what the engine did not.
type fileBaseline struct {
	store    *store.Store
	blocks   openTwice // the store, to read
	scratch  openTwice // to write
	memory   *hostmem.Buffer
	durable  bool
	ownFirst bool
}

const (
	baselineThreads = 8
	baselinePiece   = 1 << 20 // 1 MiB
	wholePages      = 4 << 10
)

func newFileBaseline(s *store.Store, path string, batch int, durable bool) (_ *fileBaseline,
	err error) {
	b := &fileBaseline{store: s, durable: durable, blocks: unopened, scratch: unopened}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("prepare plain reads and writes: %w", err), b.close())
		}
	}()
	bytes := uint64(batch) * s.Geometry().Stride()
	if b.memory, err = hostmem.Alloc(bytes, hostmem.Options{Purpose: "replay-pread",
		Populate: true}); err != nil {
		return nil, err
	}
	if b.blocks, err = reopen(s.Segment().FD); err != nil {
		return nil, err
	}
	f, err := os.CreateTemp(existing(filepath.Dir(path)), "sluice-offload-")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err = os.Remove(f.Name()); err != nil {
		return nil, err
	}
	if b.scratch, err = reopen(int(f.Fd())); err != nil {
		return nil, err
	}
	return b, b.freshen()
}

// freshen makes the file to write to one that was reserved and never written, as a new store
// is: the first write to a place costs more than others.
func (b *fileBaseline) freshen() error {
	if err := unix.Ftruncate(b.scratch.cached, 0); err != nil {
		return os.NewSyscallError("ftruncate", err)
	}
	bytes := int64(len(b.memory.Bytes()))
	err := unix.Fallocate(b.scratch.cached, 0, 0, bytes)
	if errors.Is(err, unix.EOPNOTSUPP) {
		err = unix.Ftruncate(b.scratch.cached, bytes)
	}
	return os.NewSyscallError("fallocate", err)
}

// existing is the folder, or the one around it where that is gone with the file's name.
func existing(dir string) string {
	if _, err := os.Stat(dir); err != nil {
		return filepath.Dir(dir)
	}
	return dir
}

// turn alternates.
func (b *fileBaseline) turn() (ownFirst bool) {
	b.ownFirst = !b.ownFirst
	return b.ownFirst
}

// write writes blocks one behind the other.
func (b *fileBaseline) write(blocks [][]byte) (bytes uint64, err error) {
	stride := b.store.Geometry().Stride()
	for _, p := range blocks {
		bytes += uint64(len(p))
	}
	err = b.spread(len(blocks), func(k int, from, n uint64) error {
		return b.scratch.all(unix.Pwrite, blocks[k][from:from+n], int64(uint64(k)*stride+from))
	})
	if err == nil && b.durable {
		err = unix.Fdatasync(b.scratch.cached)
	}
	return bytes, err
}

// read reads blocks of the store.
func (b *fileBaseline) read(places []uint32) (bytes uint64, err error) {
	g := b.store.Geometry()
	stride, base := g.Stride(), b.store.Segment().FileOff
	memory := b.memory.Bytes()
	err = b.spread(len(places), func(k int, from, n uint64) error {
		return b.blocks.all(unix.Pread, memory[uint64(k)*stride+from:][:n],
			int64(base+uint64(places[k])*stride+from))
	})
	return uint64(len(places)) * g.BlockBytes, err
}

// spread cuts blocks into pieces, and gives each thread every eighth.
func (b *fileBaseline) spread(blocks int, piece func(k int, from, n uint64) error) error {
	size := b.store.Geometry().BlockBytes
	perBlock := int((size + baselinePiece - 1) / baselinePiece)
	var errs [baselineThreads]error
	var all sync.WaitGroup
	for t := range baselineThreads {
		all.Go(func() {
			for i := t; i < blocks*perBlock && errs[t] == nil; i += baselineThreads {
				from := uint64(i%perBlock) * baselinePiece
				errs[t] = piece(i/perBlock, from, min(baselinePiece, size-from))
			}
		})
	}
	all.Wait()
	return errors.Join(errs[:]...)
}

func (b *fileBaseline) close() error {
	errs := []error{b.blocks.close(), b.scratch.close()}
	if b.memory != nil {
		errs = append(errs, b.memory.Close())
	}
	return errors.Join(errs...)
}

// openTwice is a file opened through the page cache and, where it may be, past it.
type openTwice struct{ cached, past int }

var unopened = openTwice{-1, -1}

func reopen(fd int) (o openTwice, err error) {
	o = unopened
	name := "/proc/self/fd/" + strconv.Itoa(fd)
	if o.cached, err = unix.Open(name, unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
		return unopened, os.NewSyscallError("open", err)
	}
	if past, err := unix.Open(name, unix.O_RDWR|unix.O_DIRECT|unix.O_CLOEXEC, 0); err == nil {
		o.past = past
	}
	return o, nil
}

func (o *openTwice) close() error {
	var errs []error
	for _, fd := range []int{o.cached, o.past} {
		if fd >= 0 {
			errs = append(errs, unix.Close(fd))
		}
	}
	return errors.Join(errs...)
}

// all moves every byte of p: whole pages past the page cache, unless the kernel does not take
// them so.
func (o *openTwice) all(call func(fd int, p []byte, off int64) (int, error), p []byte,
	off int64) error {
	if whole := len(p) / wholePages * wholePages; o.past >= 0 && whole > 0 {
		switch n, err := call(o.past, p[:whole], off); {
		case err == nil:
			p, off = p[n:], off+int64(n)
		case !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EINTR):
			return err
		}
	}
	for len(p) > 0 {
		n, err := call(o.cached, p, off)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		case n == 0:
			return fmt.Errorf("the file ends at %d: %w", off, unix.EIO)
		default:
			p, off = p[n:], off+int64(n)
		}
	}
	return nil
}

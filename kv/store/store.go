// SPDX-License-Identifier: Apache-2.0

// Package store keeps KV blocks in a file that survives the process.
//
// A store is a header, a table with a record for each block, and the blocks, each of the
// same size. The blocks are a segment for the engine to register, so transfers move their
// bytes; this package keeps the books. The writer of a block calls Begin before the first
// byte moves and Commit after the last has arrived, so the record of a block is valid
// only while its bytes are what it says:
//
//	s.Begin(block)              // from now on the block holds nothing
//	… write the bytes …         // a transfer to the region of s.Segment
//	s.Commit(block, name, crc)  // from now on it holds name
//
// # What a crash leaves
//
// When the process is killed, whatever it was doing, each block holds nothing or what its
// last Commit said. A process that opens the store gets it once nothing of the one before
// can land any more: the lock goes with the last descriptor that the kernel has, and posix leaves
// it one until its last request has ended. (Over gds that is with nvidia-fs: not known.)
//
// When the machine loses power that holds, too, if Options.Durable is set and the blocks are
// written by a backend that completes a write once the disk has it (posix.Config.Durable).
// Without, a record may have reached the disk and its bytes not: Verify finds that, with a
// CRC-32C of the bytes. Records may be older than the last ones, too: Seq goes on from those.
package store

import (
	"errors"
	"fmt"
	"math"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/csrc/digest"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/files"
)

// Name names the content of a block, as pool.Hash does: the tokens in it and before it.
type Name [16]byte

// Geometry is the shape of a store. It is written once.
type Geometry struct {
	BlockBytes uint64 // of one block, up to 4 GiB
	Blocks     uint64 // up to 1<<31
	Tag        [32]byte
}

// Options say how a store is opened.
type Options struct {
	// Durable has Begin and Commit return once the disk has the record.
	Durable bool
}

// Block is what a store knows of one block.
type Block struct {
	Name Name
	Seq  uint64 // of its Commit: later ones are higher, in later processes too
	Len  uint64 // bytes that it holds
	Sum  uint32 // CRC-32C of those, see Sum
}

// Store is an open store. All methods may be called by any goroutine; for one block Begin
// and Commit take turns.
type Store struct {
	f    *os.File
	geo  Geometry
	id   [16]byte // drawn when the store was made: records of others are none
	opts Options

	mu     sync.Mutex
	seq    uint64
	blocks []Block             // Seq 0: holds nothing
	unsure map[uint32]struct{} // those of which the file may say something else: a write failed
	closed bool
}

// Create makes a new store, with room on the disk for all of it: a *RoomError says that there
// is none. The path must be free.
func Create(path string, g Geometry, o Options) (*Store, error) {
	if err := g.check(); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("create store: %w", err)
	}
	s := &Store{f: f, geo: g, opts: o, unsure: map[uint32]struct{}{}}
	if err := s.create(); err != nil {
		// the lock goes last: who opens the store by then would lose it
		return nil, errors.Join(fmt.Errorf("create store: %w", err), os.Remove(path), f.Close())
	}
	return s, nil
}

func (s *Store) create() error {
	if err := lock(s.f); err != nil {
		return err
	}
	if err := reserve(s.f, s.geo.fileBytes()); err != nil {
		return err
	}
	s.blocks = make([]Block, s.geo.Blocks) // now that the disk has room for them
	header := newHeader(s.geo)
	s.id = header.id
	if _, err := s.f.WriteAt(header.encode(), 0); err != nil {
		return err
	}
	if err := s.f.Sync(); err != nil {
		return err
	}
	return syncEntry(s.f)
}

// syncEntry has the disk keep the name of a new file; a test sees it called.
var syncEntry = files.SyncEntry

// Open opens a store and reads its records. While another process has it, or the kernel still
// ends what that had begun, the error is engine.ErrBusy; a file that is no store, or a
// damaged one, is engine.ErrCorrupt.
func Open(path string, o Options) (*Store, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	s := &Store{f: f, opts: o, unsure: map[uint32]struct{}{}}
	if err := s.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("open store %s: %w", path, err), f.Close())
	}
	return s, nil
}

func (s *Store) open() error {
	if err := lock(s.f); err != nil {
		return err
	}
	if s.opts.Durable {
		if err := s.settle(); err != nil {
			return err
		}
	}
	header, err := readHeader(s.f)
	if err != nil {
		return err
	}
	s.geo, s.id = header.geo, header.id
	info, err := s.f.Stat()
	if err != nil {
		return err
	}
	if uint64(info.Size()) < s.geo.fileBytes() {
		return fmt.Errorf("the file has %d of %d bytes: %w", info.Size(), s.geo.fileBytes(),
			engine.ErrCorrupt)
	}
	return s.readTable()
}

// settle has the page cache hold of the records what the disk has. A process that was killed
// may have left some that were not synced, or, when a sync of its failed, never will be: Begin
// takes what it reads here for what the disk says.
func (s *Store) settle() error {
	if err := s.sync(); err != nil {
		return err
	}
	err := unix.Fadvise(int(s.f.Fd()), 0, 0, unix.FADV_DONTNEED)
	return os.NewSyscallError("posix_fadvise", err)
}

// lock takes the store for this open file, and thereby for every descriptor that is a
// duplicate of it: those of a backend, and of the kernel.
func lock(f *os.File) error {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return fmt.Errorf("another process has the store: %w", engine.ErrBusy)
	}
	return os.NewSyscallError("flock", err)
}

// Geometry returns the shape of the store.
func (s *Store) Geometry() Geometry { return s.geo }

// Segment returns the blocks for Engine.Register: block i begins at i times Stride. The
// descriptor is the store's, and must stay open while the region is registered.
func (s *Store) Segment() driver.Segment {
	return driver.Segment{Kind: driver.File, Len: s.geo.Blocks * s.geo.Stride(),
		FD: int(s.f.Fd()), FileOff: s.geo.dataOff()}
}

// Begin says that the bytes of blocks are about to change: from its return on they hold
// nothing, whatever happens.
func (s *Store) Begin(blocks ...uint32) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return engine.ErrClosed
	}
	for _, i := range blocks {
		if err := s.inside(i); err != nil {
			return err
		}
	}
	written := false
	for _, i := range blocks {
		if _, unsure := s.unsure[i]; s.blocks[i].Seq == 0 && !unsure {
			continue // the file says so, too
		}
		// The last number stays in the file when the record that had it goes.
		if err := s.write(i, Block{Seq: s.seq}); err != nil {
			return err
		}
		written = true
	}
	if written {
		if err := s.sync(); err != nil {
			return err
		}
	}
	for _, i := range blocks {
		s.blocks[i] = Block{}
		delete(s.unsure, i)
	}
	return nil
}

// Commit says that n bytes of a block have arrived, what they are, and their Sum. Others find
// the block once it has returned.
func (s *Store) Commit(i uint32, name Name, n uint64, sum uint32) (Block, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return Block{}, engine.ErrClosed
	}
	if err := s.inside(i); err != nil {
		return Block{}, err
	}
	if n == 0 || n > s.geo.BlockBytes {
		return Block{}, fmt.Errorf("commit %d bytes to a block of %d: %w", n, s.geo.BlockBytes,
			engine.ErrBounds)
	}
	if s.blocks[i].Seq != 0 {
		return Block{}, fmt.Errorf("commit block %d: call Begin before its bytes change: %w", i,
			engine.ErrBusy)
	}
	s.seq++
	b := Block{Name: name, Seq: s.seq, Len: n, Sum: sum}
	err := s.write(i, b)
	if err == nil {
		err = s.sync()
	}
	if err != nil {
		s.unsure[i] = struct{}{}
		return Block{}, err
	}
	s.blocks[i] = b
	return b, nil
}

// Block returns what a block holds; ok is false for nothing.
func (s *Store) Block(i uint32) (b Block, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if uint64(i) >= uint64(len(s.blocks)) {
		return Block{}, false
	}
	return s.blocks[i], s.blocks[i].Seq != 0
}

// Each calls visit for every block that holds something, in their order, until it returns
// false. It must not call the store.
func (s *Store) Each(visit func(i uint32, b Block) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.blocks {
		if s.blocks[i].Seq != 0 && !visit(uint32(i), s.blocks[i]) {
			return
		}
	}
}

// Sum is what Commit takes and Verify compares: the CRC-32C of the bytes.
func Sum(p []byte) uint32 { return digest.CRC32C(p) }

// Verify reports whether bytes that were read are what Commit was told of. The error wraps
// engine.ErrCorrupt.
func (b Block) Verify(p []byte) error {
	if b.Seq == 0 || uint64(len(p)) < b.Len {
		return fmt.Errorf("verify %d bytes of a block of %d: %w", len(p), b.Len, engine.ErrBounds)
	}
	if got := Sum(p[:b.Len]); got != b.Sum {
		return fmt.Errorf("block %x, commit %d: its bytes have CRC-32C %08x, not %08x: %w", b.Name,
			b.Seq, got, b.Sum, engine.ErrCorrupt)
	}
	return nil
}

// Close closes the file. Regions of it have to be closed first.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	return s.f.Close()
}

func (s *Store) inside(i uint32) error {
	if uint64(i) >= s.geo.Blocks {
		return fmt.Errorf("block %d of %d: %w", i, s.geo.Blocks, engine.ErrBounds)
	}
	return nil
}

func (s *Store) sync() error {
	if !s.opts.Durable {
		return nil
	}
	return os.NewSyscallError("fdatasync", unix.Fdatasync(int(s.f.Fd())))
}

func (g *Geometry) check() error {
	switch {
	case g.BlockBytes == 0 || g.BlockBytes > 4<<30:
		return fmt.Errorf("store: blocks of %d bytes, from 1 to 4 GiB: %w", g.BlockBytes,
			engine.ErrBounds)
	case g.Blocks == 0 || g.Blocks > 1<<31:
		return fmt.Errorf("store: %d blocks, from 1 to 1<<31: %w", g.Blocks, engine.ErrBounds)
	case g.Blocks > (math.MaxInt64-2*dataAlign-g.Blocks*recordBytes)/g.Stride():
		return fmt.Errorf("store: %d blocks of %d bytes are no file: %w", g.Blocks, g.BlockBytes,
			engine.ErrBounds)
	}
	return nil
}

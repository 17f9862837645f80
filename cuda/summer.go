// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/csrc/digest"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// A launch of the kernel reads a room: 4 MiB of pinned memory that Summer fills and copies to the
// card. It has the total that the kernel adds to, the cellsArgs, and then keys and lists of slots.
const (
	roomBytes  = 4 << 20 // room for the key of the largest cells, and as long a list
	totalRoom  = 32      // bytes of the total
	launchMost = 64      // cellsArgs of a launch
	roomHead   = totalRoom + launchMost*cellsBytes
)

// Summer digests cells in the memory of one card, as package csrc/digest does in that of the host.
// All methods may be called by any goroutine; sums go one after the other, on a stream of the
// lowest priority.
type Summer struct {
	ordinal int
	blocks  uint64 // thread blocks of a launch, at most

	mu     sync.Mutex // guards what follows
	d      *gpu.Device
	pinned *hostmem.Buffer // the room
	seen   uint64          // by which address the card reaches the room
	copied uint64          // address of the copy in the card's memory
	closed bool

	// what the room has for the next launch
	used  uint64 // bytes
	n     int    // cellsArgs
	work  uint64 // threads that the cells keep busy
	key   *digest.Key
	keys  uint64 // address of key in the copy
	args  digestArgs
	total digestTotal
}

// OpenSummer opens a card by its number, through the libcuda at that path ("": the system's
// libcuda.so.1), and has the driver compile the kernel, which takes as many multiprocessors as the
// budget says; a zero budget is all of them. If something is missing or too old, the error is a
// *driver.UnavailableError.
func OpenSummer(library string, ordinal int, b Budget) (*Summer, error) {
	if err := gpu.Load(library); err != nil {
		return nil, err
	}
	d, err := gpu.Open(ordinal)
	if err != nil {
		return nil, err
	}
	f := d.Facts()
	s := &Summer{ordinal: ordinal, blocks: uint64(f.SMs), d: d}
	if b.SMs > 0 {
		s.blocks = min(s.blocks, uint64(b.SMs))
	}
	if err := s.open(&Card{f.Compute, f.Driver, f.SMs, f.Shared}); err != nil {
		_ = s.Close()
		return nil, fmt.Errorf("open a summer on device %d, %s: %w", ordinal, f.Name, err)
	}
	return s, nil
}

func (s *Summer) open(c *Card) (err error) {
	if err = c.check(&sums); err != nil {
		return err
	}
	if err = s.d.Load(sums.PTX, sums.Kernels); err != nil {
		return err
	}
	if s.copied, err = s.d.Alloc(roomBytes); err != nil {
		return err
	}
	s.pinned, err = hostmem.Alloc(roomBytes, hostmem.Options{Purpose: "cuda-digest"})
	if err != nil {
		return err
	}
	s.seen, err = s.d.Pin(s.pinned.Bytes())
	return err
}

// Close waits for the Sum under way and closes the card. It is idempotent.
func (s *Summer) Close() (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	if s.seen != 0 {
		err = s.d.Unpin(s.pinned.Bytes())
	}
	if s.pinned != nil {
		err = errors.Join(err, s.pinned.Close())
	}
	if s.copied != 0 {
		err = errors.Join(err, s.d.Free(s.copied))
	}
	return errors.Join(err, s.d.Close())
}

// Sum digests cells in memory of this card and waits for the result, which is that of digest.Sum
// over the same bytes. Lists of slots are copied first, and may change meanwhile. All of the
// memories must be allocated: after a kernel has read other addresses, the process cannot use the
// device any more. Sum allocates nothing unless it fails.
func (s *Summer) Sum(list []digest.DeviceCells) (digest.Digest, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return digest.Digest{}, driver.ErrClosed
	}
	var sum digest.Digest
	s.begin()
	for i := range list {
		if err := s.add(&list[i], &sum); err != nil {
			return digest.Digest{}, err
		}
	}
	if err := s.launch(&sum); err != nil {
		return digest.Digest{}, err
	}
	return sum, nil
}

// begin empties the room.
func (s *Summer) begin() { s.used, s.n, s.work, s.key = roomHead, 0, 0, nil }

// add puts cells into the room. It launches the kernel when the room is full.
func (s *Summer) add(d *digest.DeviceCells, sum *digest.Digest) error {
	if d.Memory.Device != s.ordinal {
		return fmt.Errorf("digest cells of device %d by a summer of device %d: %w",
			d.Memory.Device, s.ordinal, driver.ErrNotSupported)
	}
	c := d.Cells
	for !c.Empty() {
		var a cellsArgs
		if err := a.fill(&c, &d.Memory, d.Key); err != nil {
			return err
		}
		n := s.fits(&c, d.Key)
		if n < c.Count { // not all fit: some of them, into an empty room
			if s.n > 0 {
				if err := s.launch(sum); err != nil {
					return err
				}
				continue
			}
			part := c
			part.Count = n
			if err := a.fill(&part, &d.Memory, d.Key); err != nil {
				return err
			}
		}
		s.put(&a, c.At.List, d.Key)
		sum.Cells += a.cells
		skip(&c, n)
	}
	return nil
}

// fits returns how many entries of the cells the room takes: all or, if it is empty, at least one.
func (s *Summer) fits(c *digest.Cells, k *digest.Key) int {
	room := uint64(roomBytes) - s.used
	if k != s.key {
		room -= min(room, keyBytes(k))
	}
	switch slots := room / 4; {
	case s.n == launchMost || k != s.key && uint64(roomBytes)-s.used < keyBytes(k):
		return 0
	case c.At.List == nil || uint64(len(c.At.List)) <= slots:
		return c.Count
	default:
		per := max(1, uint64(c.At.Per))
		return int(min(uint64(c.Count), slots*per-uint64(c.At.First)))
	}
}

// skip removes the first entries of the cells: whole slots, or all.
func skip(c *digest.Cells, entries int) {
	per, next := max(1, uint64(c.At.Per)), uint64(c.At.First)+uint64(entries)
	if c.Count -= entries; c.Count == 0 {
		return
	}
	c.At.List, c.At.First = c.At.List[next/per:], uint32(next%per)
	c.Coord += uint64(entries) * c.Turn
}

// keyBytes is how much of the room a key takes: the kernel reads 32 bytes for each 16 of a cell.
func keyBytes(k *digest.Key) uint64 { return (k.Cell() + 15) / 16 * 32 }

// put adds cells for which there is room.
func (s *Summer) put(a *cellsArgs, list []uint32, k *digest.Key) {
	room := s.pinned.Bytes()
	if k != s.key {
		first, _ := k.Lane(0)
		second, _ := k.Lane(1)
		s.key, s.keys = k, s.copied+s.used
		for i := range first {
			at := room[s.used+16*uint64(i):]
			binary.NativeEndian.PutUint64(at, first[i])
			binary.NativeEndian.PutUint64(at[8:], second[i])
		}
		s.used += keyBytes(k)
	}
	a.keys = s.keys
	if list != nil {
		slots := (a.first + (a.cells / (a.n[0] * a.n[1])) + a.per - 1) / a.per
		a.list = s.copied + s.used
		for i, slot := range list[:slots] {
			binary.NativeEndian.PutUint32(room[s.used+4*uint64(i):], slot)
		}
		s.used += (4*slots + 15) / 16 * 16
	}
	copy(room[totalRoom+uint64(s.n)*cellsBytes:], bytesOf(a))
	s.n++
	s.work = max(s.work, a.cells*uint64(a.threads))
}

// launch copies the room to the card, has the kernel add the cells up, and empties the room.
func (s *Summer) launch(sum *digest.Digest) error {
	if s.n == 0 {
		return nil
	}
	room := s.pinned.Bytes()
	clear(room[:totalRoom])
	s.args = digestArgs{list: s.copied + totalRoom, total: s.copied, n: uint32(s.n)}
	if err := s.d.Copy(s.copied, s.seen, s.used); err != nil {
		return err
	}
	blocks := max(1, min(s.blocks, (s.work+digestThreads-1)/digestThreads))
	l := gpu.Launch{Blocks: uint32(blocks), Threads: digestThreads, Args: bytesOf(&s.args),
		Tally: s.copied}
	if err := s.d.Launch(&l, room[:totalBytes]); err != nil {
		return errors.Join(err, s.d.Sync())
	}
	copy(bytesOf(&s.total), room)
	s.begin()
	if s.total.outside > 0 {
		return driver.ErrBounds
	}
	sum.A += s.total.sum[0]
	sum.B += s.total.sum[1]
	return nil
}

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

// What a launch of Summer reads lies in a room of pinned memory, a copy of which the card has: a
// total, cells, and then keys and lists of slots.
const (
	roomBytes  = 4 << 20 // the keys of the largest cells have room, beside as large a list
	totalRoom  = 32
	launchMost = 64 // cellsArgs of a launch
	roomHead   = totalRoom + launchMost*cellsBytes
)

// Summer digests cells in the memory of one card, as package csrc/digest does in that of the host.
// All methods may be called by any goroutine; sums go one after the other, on a stream of the
// lowest priority.
type Summer struct {
	ordinal int
	blocks  uint64 // at most

	mu     sync.Mutex // guards what follows
	d      *gpu.Device
	pinned *hostmem.Buffer // the room
	seen   uint64          // address of the room, as the card sees it
	copied uint64          // address of the card's copy
	closed bool

	used  uint64 // bytes of the room
	n     int    // cellsArgs in it
	work  uint64 // threads that have something to do
	key   *digest.Key
	keys  uint64 // address of those of key
	args  digestArgs
	total digestTotal
}

// OpenSummer opens a card, of which the kernel takes as many multiprocessors as the budget says; a
// zero budget is all of them. Where something is missing or too old, the error
// is a *driver.UnavailableError.
func OpenSummer(o DeviceOptions, b Budget) (*Summer, error) {
	if err := gpu.Load(o.Library); err != nil {
		return nil, err
	}
	d, err := gpu.Open(o.Ordinal)
	if err != nil {
		return nil, err
	}
	f := d.Facts()
	s := &Summer{ordinal: o.Ordinal, blocks: uint64(f.SMs), d: d}
	if b.SMs > 0 {
		s.blocks = min(s.blocks, uint64(b.SMs))
	}
	if err := s.open(&Card{f.Compute, f.Driver, f.SMs, f.Shared}); err != nil {
		_ = s.Close()
		return nil, fmt.Errorf("open a summer on device %d, %s: %w", o.Ordinal, f.Name, err)
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

// Close lets the card go, after the sum under way. It is idempotent.
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

// Sum digests cells of this card and waits for the end. It answers as digest.Sum does. Lists of
// slots are copied first, and may change meanwhile. All of the memories must be allocated: a kernel
// that meets other addresses ends the use of the device. Sum allocates nothing unless it fails.
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

// add puts cells into the room. When it is full, what is there is summed.
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
		if n < c.Count { // a part of the list, now or in an empty room
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

// fits is how many entries of the cells have room; all of them or, in an empty room, some.
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

// skip leaves entries out, all of a slot or all that there are.
func skip(c *digest.Cells, entries int) {
	per, next := max(1, uint64(c.At.Per)), uint64(c.At.First)+uint64(entries)
	if c.Count -= entries; c.Count == 0 {
		return
	}
	c.At.List, c.At.First = c.At.List[next/per:], uint32(next%per)
	c.Coord += uint64(entries) * c.Turn
}

// keyBytes is the room of a key: pieces of 16 bytes are multiplied whole.
func keyBytes(k *digest.Key) uint64 { return (k.Cell() + 15) / 16 * 32 }

// put adds cells whose key and slots have room.
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
	copy(room[totalRoom+uint64(s.n)*cellsBytes:], a.bytes())
	s.n++
	s.work = max(s.work, a.cells*uint64(a.threads))
}

// launch sums what is in the room, and empties it.
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
	l := gpu.Launch{Blocks: uint32(blocks), Threads: digestThreads, Args: s.args.bytes(),
		Tally: s.copied}
	if err := s.d.Launch(&l, room[:totalBytes]); err != nil {
		return errors.Join(err, s.d.Sync())
	}
	copy(s.total.bytes(), room)
	s.begin()
	if s.total.outside > 0 {
		return driver.ErrBounds
	}
	sum.A += s.total.sum[0]
	sum.B += s.total.sum[1]
	return nil
}

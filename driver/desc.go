// SPDX-License-Identifier: Apache-2.0

package driver

import "fmt"

// Op is the direction of a one-sided transfer.
type Op uint8

// The two operations. Both are one-sided: the peer's program takes no part.
const (
	Read  Op = 1 // from the peer's memory into local memory
	Write Op = 2 // from local memory into the peer's memory
)

// String returns "read" or "write".
func (o Op) String() string {
	switch o {
	case Read:
		return "read"
	case Write:
		return "write"
	}
	return fmt.Sprintf("Op(%d)", uint8(o))
}

// Desc is one contiguous copy. Offsets are in bytes from the start of the
// memory that the key names. It holds no pointer, and its layout is that of
// sl_desc in csrc/sluice.h, so that a slice of it crosses into C as it is.
type Desc struct {
	Local, Remote, Len  uint64
	LocalKey, RemoteKey uint32
}

// Pages is a pattern of scattered entries of one length between one pair of
// memories: entry i lies at Base + index[i]*Stride on each side. An index list
// may be nil, then index[i] is i. In a list that is written to, an entry that is
// named twice holds one of the values afterwards.
type Pages struct {
	Count                     int    // entries; the length of each list that is not nil
	EntryLen                  uint64 // bytes
	LocalBase, RemoteBase     uint64 // bytes
	LocalStride, RemoteStride uint64 // bytes; at least EntryLen, unless all entries are one
	Local, Remote             []uint32
	LocalKey, RemoteKey       uint32
}

// LocalAt returns the offset of entry i in local memory.
func (p *Pages) LocalAt(i int) uint64 { return p.LocalBase + at(p.Local, i)*p.LocalStride }

// RemoteAt returns the offset of entry i in the peer's memory.
func (p *Pages) RemoteAt(i int) uint64 { return p.RemoteBase + at(p.Remote, i)*p.RemoteStride }

// Bytes returns the sum of all entries.
func (p *Pages) Bytes() uint64 { return uint64(p.Count) * p.EntryLen }

// Desc returns entry i as a descriptor.
func (p *Pages) Desc(i int) Desc {
	return Desc{Local: p.LocalAt(i), Remote: p.RemoteAt(i), Len: p.EntryLen, LocalKey: p.LocalKey, RemoteKey: p.RemoteKey}
}

func at(list []uint32, i int) uint64 {
	if list == nil {
		return uint64(i)
	}
	return uint64(list[i])
}

// Check reports whether the pattern is well formed and stays within both sizes.
func (p *Pages) Check(localSize, remoteSize uint64) error {
	if p.Count <= 0 || p.EntryLen == 0 {
		return fmt.Errorf("pages: %d entries of %d bytes: %w", p.Count, p.EntryLen, ErrBounds)
	}
	if err := checkSide("local", p.Count, p.EntryLen, p.LocalBase, p.LocalStride, p.Local, localSize); err != nil {
		return err
	}
	return checkSide("remote", p.Count, p.EntryLen, p.RemoteBase, p.RemoteStride, p.Remote, remoteSize)
}

func checkSide(side string, count int, entry, base, stride uint64, list []uint32, size uint64) error {
	if list != nil && len(list) != count {
		return fmt.Errorf("pages: %s list has %d of %d entries: %w", side, len(list), count, ErrBounds)
	}
	if stride < entry && stride != 0 {
		return fmt.Errorf("pages: %s stride %d is below the entry length %d: %w", side, stride, entry, ErrBounds)
	}
	room := entriesWithin(size, base, entry, stride)
	if list == nil {
		if uint64(count) > room {
			return pageBoundsError(side, uint64(count-1), room, size)
		}
		return nil
	}
	for _, index := range list {
		if uint64(index) >= room {
			return pageBoundsError(side, uint64(index), room, size)
		}
	}
	return nil
}

// entriesWithin returns how many entries fit, so that one comparison per index
// checks bounds and overflow alike.
func entriesWithin(size, base, entry, stride uint64) uint64 {
	if base > size || entry > size-base {
		return 0
	}
	if stride == 0 {
		return 1 << 32 // every index names the same entry
	}
	return (size-base-entry)/stride + 1
}

func pageBoundsError(side string, index, room, size uint64) error {
	return fmt.Errorf("pages: %s index %d is past the %d entries that fit in %d bytes: %w", side, index, room, size, ErrBounds)
}

// Check reports whether the descriptor stays within both sizes, overflow included.
func (d *Desc) Check(localSize, remoteSize uint64) error {
	if d.Len == 0 || !within(d.Local, d.Len, localSize) || !within(d.Remote, d.Len, remoteSize) {
		return fmt.Errorf("descriptor of %d bytes at local %d of %d, remote %d of %d: %w",
			d.Len, d.Local, localSize, d.Remote, remoteSize, ErrBounds)
	}
	return nil
}

func within(off, n, size uint64) bool { return off <= size && n <= size-off }

// Completion is the end of one tag.
type Completion struct {
	Tag uint64
	Err error // nil, or why; *PieceError names the piece where that is known
}

// Message is what a peer sent, or the news that it can send no more. That news
// is the last message of each connection, exactly one, whether the peer died or
// closed politely.
type Message struct {
	From string // Addr of the sending backend
	Data []byte // the receiver's to keep
	Err  error  // ErrPeerLost: the last message from this peer; Data is nil
}

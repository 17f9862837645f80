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

// Tail says what follows the bytes of a Write to the peer.
type Tail uint8

// The tails.
const (
	NoTail     Tail = iota
	NotifyTail      // Batch.Notify, a message that the peer's program receives
)

// Desc is one contiguous copy. Offsets are in bytes from the start of the
// memory that the key names. It holds no pointer, and its layout is that of
// sl_desc in csrc/sluice.h, so that a slice of it crosses into C as it is.
type Desc struct {
	Local, Remote, Len  uint64
	LocalKey, RemoteKey uint32
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

// Batch is what one Submit takes: bytes to move and, with a Write, what follows them.
//
// It belongs to the caller. Once a completion of the batch can be polled, a Peer must not touch it.
// Once Submit has returned, the Peer must keep nothing of it except the index lists of Pattern: the
// engine guarantees that they exist until the tag completes, and the program is asked not to change
// them. If a list changes all the same, the Peer must not touch a byte outside the memories.
type Batch struct {
	Op      Op
	Tail    Tail     // Write only
	Durable bool     // Write only: it completes once the bytes would survive a loss of power
	Descs   []Desc   // or
	Pattern *Pattern // or neither: the tail alone
	Notify  []byte   // for NotifyTail; nil is an empty message

	// Total is how many bytes the transfer has that this is a batch of, where that is more: a Peer
	// that copies spares the caches for so many. It may be 0.
	Total uint64
}

// Can says what a Peer takes beyond descriptors, and how it is chosen.
type Can uint8

// What a Peer can take.
const (
	CanPattern Can = 1 << iota // Batch.Pattern
	CanNotify                  // NotifyTail, and answers to it
	CanDurable                 // Batch.Durable

	// LastResort makes the engine prefer any other backend that serves the pair of memories, or
	// carries notifications, whatever the costs. A Peer sets it if it lacks a property that a
	// program must not lose unasked, such as encryption.
	LastResort
)

// Errors of Check, allocated once: the engine may offer a Peer what it cannot do on its hot path.
var (
	errOp   = fmt.Errorf("neither a read nor a write: %w", ErrNotSupported)
	errTail = fmt.Errorf("a read has no tail: submit a write of the tail alone behind it: %w",
		ErrNotSupported)
	errUnknown = fmt.Errorf("an unknown tail: %w", ErrNotSupported)
	errDurable = fmt.Errorf("only a write without a tail can be durable: %w", ErrNotSupported)
	errBoth    = fmt.Errorf("descriptors and a pattern in one batch: %w", ErrNotSupported)
	errNothing = fmt.Errorf("a batch of nothing: %w", ErrBounds)
	errNoBit   = fmt.Errorf("this peer does not take such a batch: see Peer.Can: %w",
		ErrNotSupported)
	errNoNotify = fmt.Errorf("this peer carries no notifications: %w", ErrNotSupported)
)

// Check reports whether the combination of fields is legal and can has the bits that it needs. It
// does not check bounds. It does not allocate.
func (b *Batch) Check(can Can) error {
	switch {
	case b.Op != Read && b.Op != Write:
		return errOp
	case b.Tail != NoTail && b.Op == Read:
		return errTail
	case b.Durable && (b.Op == Read || b.Tail != NoTail):
		return errDurable
	case len(b.Descs) > 0 && b.Pattern != nil:
		return errBoth
	case len(b.Descs) == 0 && b.Pattern == nil && b.Tail == NoTail:
		return errNothing
	case b.Durable && can&CanDurable == 0:
		return errNoBit
	case b.Tail != NoTail && b.Tail != NotifyTail:
		return errUnknown
	case b.Tail == NotifyTail && can&CanNotify == 0:
		return errNoNotify
	case b.Pattern != nil && can&CanPattern == 0:
		return errNoBit
	}
	return nil
}

// Completion is the end of one tag.
type Completion struct {
	Tag uint64
	// Err is nil or the cause; a *PieceError names the piece where it is known. If it also is
	// ErrUnproven, the tag has ended here, but its bytes may still land at a peer that does not
	// answer.
	Err error
}

// Message is a message that arrived by a connection, or the report that the connection has ended.
type Message struct {
	// Conn is the receiving backend's own number for the connection, which no sender can
	// choose: never 0, and never used again by that backend. Answer takes it. A message
	// that answers one of ours has the number of our Peer (Peer.Conn).
	Conn uint64

	Data []byte // the receiver's to keep

	// Err is ErrPeerLost in the last message of each connection that a peer opened, exactly
	// one, whether the peer died or closed politely; Data is nil.
	Err error
}

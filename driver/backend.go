// SPDX-License-Identifier: Apache-2.0

// Package driver is the contract between the engine and whatever moves
// bytes: shared memory, a socket, a NIC, a disk, a copy engine.
//
// Comments here speak to the implementer. "Guaranteed" is what the engine
// promises before it calls, "must" is what the implementation promises in
// return, "may" is left to it. Package drivertest checks the musts.
//
// # What a completion means
//
// This is the one place that says it:
//
//   - A Read that completed without error: the bytes are in local memory and
//     visible to every goroutine that learns of the completion.
//   - A Write that completed without error: the local bytes may be reused, and
//     the bytes are placed in the peer's memory. They are visible to the peer's
//     program once it has received a notification that was submitted with them
//     or later to the same peer, or after a fence of that memory.
//   - A completion with an error is as final as one without: from then on no
//     byte of the transfer lands, on either side. What had landed before stays,
//     and is not described. A backend that cannot prove this yet must not
//     complete yet.
//   - Every tag that Submit accepted completes exactly once, whatever happens
//     to the peer, to the connection or to the backend.
//   - The peer's program takes no part: it need not Poll, and neither need ours
//     for a transfer to go on. Only the completion waits for Poll.
package driver

import (
	"context"
	"io"
)

// Backend moves bytes between two kinds of memory. It is small: package mem, the
// reference, is a few hundred lines with nearly every optional interface. Those are
// found by type assertion in package engine alone.
//
// The engine is guaranteed to validate, bounds-check and split before it calls;
// a backend must nevertheless refuse what would touch bytes outside a
// registered range, since a peer is not the engine.
//
// All methods may be called by any goroutine at any time, except that Poll is
// guaranteed never to run twice at once.
type Backend interface {
	// Caps says what the backend can do. It must be constant and cheap.
	Caps() Caps

	// Register makes a range known and reachable by peers that hold its token.
	// It must not copy the bytes. Several registrations may overlap, and the
	// engine registers a part of a range once more to lease it, so registering
	// a part of known memory should be cheap. A kind of memory that Caps does
	// not list is answered with ErrNotSupported.
	Register(Segment) (Memory, error)

	// Addr is what a peer's Connect needs: opaque, at most AddrMax bytes,
	// constant, and free of secrets (tokens carry those).
	Addr() []byte

	// Connect opens the way to the backend with this Addr. Its own Addr is
	// allowed and serves local moves. Connecting twice gives two independent
	// Peers. It must return within ctx, and may not be cancelled by it later.
	Connect(ctx context.Context, addr []byte) (Peer, error)

	// Poll moves finished work into done and returns how many entries it
	// filled; 0 with a nil error means that nothing is ready. It must not block.
	// After Close it must deliver what completions are left and then return
	// ErrClosed. A completion that came to be while Submit ran must be there when
	// Submit has returned: the engine is guaranteed to poll then, so such a
	// completion needs no wake-up.
	Poll(done []Completion) (n int, err error)

	// Close ends every Peer (see Peer.Close) and every Memory and gives back all
	// that the backend holds: descriptors, goroutines, mappings. It must be
	// idempotent, and bounded in time also when a peer is frozen. Afterwards
	// Register, Connect, Import and Submit must answer ErrClosed; the other
	// methods of it and of what came from it must merely return.
	Close() error
}

// Memory is one registration.
type Memory interface {
	// Key names the memory in Desc.LocalKey. Keys are small and may be reused
	// after Close.
	Key() uint32

	// AppendToken appends what a peer's Import needs to reach this memory. A
	// token must be useless to whoever lacks it (it begins with Segment.Secret,
	// 128 unguessable bits), must carry key, epoch and bounds, and must be
	// refused with ErrBadToken when it is cut, altered or another backend's.
	AppendToken(dst []byte) ([]byte, error)

	// Close makes the memory unknown. The engine is guaranteed to have fenced it
	// first where the backend is a Fencer; without a Fencer, Close must itself
	// return only when no access through a token of it can land any more.
	Close() error
}

// Peer is the way to another backend of the same make.
type Peer interface {
	// Import makes the peer's memory known under a key for Desc.RemoteKey.
	// A token whose epoch has ended is answered with ErrRevoked, one that is cut,
	// altered or foreign with ErrBadToken (an alteration may also look like an
	// epoch that has ended). Size is the range that offsets may use. Each call gives
	// a key of its own, to be dropped on its own.
	Import(token []byte) (key uint32, size uint64, err error)

	// Drop forgets an imported key. Transfers in flight are not disturbed.
	Drop(key uint32)

	// Submit starts one batch under a tag: all of it or none. It must not block
	// for the bytes and must not keep descs after it has returned. The tag is
	// guaranteed to be unused. Descs are guaranteed to be at most Caps.DescsMax,
	// at least 1, each of a length over 0, and the local memory to stay registered
	// until the tag completes. ErrFull means that nothing was started
	// and that the engine will poll and try again; any other error means that
	// nothing was started and nothing will complete: ErrBounds for an unknown key
	// or a range outside its memory, ErrReadOnly, ErrPeerLost once the loss is
	// known. A key whose epoch has ended gives ErrRevoked, here or as the outcome.
	Submit(op Op, tag uint64, descs []Desc) error

	// Close ends the connection: every outstanding tag must complete (with
	// ErrClosed, unless it finished) before Close returns, under the same promise
	// as every completion, and without a call of Poll meanwhile. This is the strong
	// means of the engine against a frozen peer, so it must be bounded in time.
	Close() error
}

// Canceler is implemented by a Peer that can end a batch early.
type Canceler interface {
	// Cancel asks for the end of one tag. It must not block. The completion
	// still arrives, once, with ErrAborted or with the outcome that came first.
	// An unknown or finished tag is ignored.
	Cancel(tag uint64)
}

// Pager is implemented by a Peer that takes scattered entries natively.
type Pager interface {
	// SubmitPages is Submit for one pattern. The pattern is guaranteed to be
	// valid (Pages.Check) and must not be kept, but its index lists are
	// guaranteed to stay unchanged until the tag completes. msg is nil unless the
	// Peer is a Notifier; then it follows the data as in SubmitNotify.
	SubmitPages(op Op, tag uint64, p *Pages, msg []byte) error
}

// Persister is implemented by a Peer that can write to memory which outlives the machine's
// power, and say when the bytes are there.
type Persister interface {
	// SubmitDurable is Submit of a Write, or SubmitPages where pages is not nil, that must
	// complete without an error only once its bytes, and what is needed to find them, would
	// survive a loss of power: by a sync, say, that began after the last byte was written
	// and has ended. One such sync may serve any number of batches. Memory of which the
	// backend cannot promise that is answered with ErrNotSupported. A batch that failed
	// promises nothing of any of its bytes.
	SubmitDurable(tag uint64, descs []Desc, pages *Pages) error
}

// Notifier is implemented by a Peer that carries messages with its data.
type Notifier interface {
	// SubmitNotify is Submit followed by a message. The op is guaranteed to be
	// Write. The peer receives msg after these bytes are visible to it, without a
	// further round trip and without any call on this side. No descs: msg alone.
	// An empty, non-nil msg is a message. It is guaranteed to be at most
	// Caps.MessageMax bytes, and the caller may change it when SubmitNotify has
	// returned. The tag completes when the message is on its way. Messages to one
	// peer must arrive in the order of submission; that of a batch which failed
	// does not arrive.
	SubmitNotify(op Op, tag uint64, descs []Desc, msg []byte) error
}

// Counter is implemented by a Notifier that can count at the peer in place of a message:
// nothing waits there to be received, and its program is woken once for many batches.
type Counter interface {
	// SubmitCount is SubmitNotify, or SubmitPages where pages is not nil, with one more
	// for a counter of the peer in place of the message. The op is guaranteed to be Write.
	// No descs and no pages: the count alone. A counter of CountersMax or more is
	// answered with ErrBounds. A batch that succeeded must have counted exactly once
	// when all under way has arrived, one that failed at most once, and only if all of
	// its bytes are in place. The program of the peer takes no part: it need not
	// receive for counts to go on.
	SubmitCount(tag uint64, descs []Desc, pages *Pages, counter uint32) error
}

// Counting is implemented by a Backend whose Peers are Counters.
type Counting interface {
	// Count returns what a counter below CountersMax has come to since the backend was
	// opened, by all peers. It must never go back, and the bytes of what it counts must
	// be visible to whoever has seen it.
	Count(counter uint32) uint64

	// AwaitCount asks for a wake-up, as Armer has it, once Count has reached n: Arm must
	// then say ready once. It reports whether Count has reached n already. Each counter
	// has one such request, the last; one for math.MaxUint64 is none.
	AwaitCount(counter uint32, n uint64) (reached bool)
}

// CountersMax is how many counters a Counting backend has.
const CountersMax = 4096

// Receiver is implemented by a Backend whose Peers are Notifiers.
type Receiver interface {
	// Receive moves arrived messages into msgs and returns how many. Message.Data
	// must be the caller's to keep. It must not block, and is guaranteed never to
	// run twice at once. What is not received stays with the sender as
	// back-pressure: its Submit returns ErrFull.
	Receive(msgs []Message) (n int, err error)
}

// Armer is implemented by a Backend that can wake a sleeper.
type Armer interface {
	// FD is readable after a completion or a message arrived while armed, or when
	// a Submit that was answered with ErrFull may now succeed. The backend owns
	// it; it is an eventfd, and the engine is guaranteed to drain it.
	FD() int

	// Arm asks for one wake-up, which stays asked for whatever it returns. Ready
	// means that there may be something already: poll before you sleep.
	Arm() (ready bool, err error)
}

// Fencer is implemented by a Backend that can prove that a range is quiet.
type Fencer interface {
	// Fence ends the epoch of a registered memory: it must return nil only when
	// no access that a peer began, or will begin, through a token given out so
	// far can still land. A frozen or dead peer must not make it wait for longer
	// than the backend's configured grace: then the strong means of that backend
	// (fresh pages, a dead key, a drained queue) complete the proof. ctx bounds
	// it all the same; its error means that the proof is not there. The memory
	// stays registered, and AppendToken gives a token of the next epoch.
	Fence(ctx context.Context, key uint32) error
}

// Watcher is implemented by a Peer that notices the death of the other side
// while nothing is in flight.
type Watcher interface {
	// Lost is closed once the connection is known to be dead, or is closed.
	Lost() <-chan struct{}
}

// Helper is implemented by a Peer whose batches are copied, or whose ends are read off
// a socket, by this process in goroutines of the backend.
type Helper interface {
	// Help copies the batch of a tag, or reads its end, in the caller, who waits for it
	// anyway, when nobody else has it in hand: that saves waking somebody, and the bytes
	// stay in the caller's cache. It returns when there is no more to do for the batch or,
	// one piece or a few milliseconds later at most, when stop is closed, and reports
	// whether it did anything.
	// The engine is guaranteed to poll then, so a completion that came of it needs no
	// wake-up. It may be called for any tag, by any number of goroutines.
	Help(tag uint64, stop <-chan struct{}) bool
}

// Explainer is implemented by a Peer that has more to say about how it would
// move bytes than its Caps: which rail, which copy, which detour, and why.
type Explainer interface {
	// Explain says it in one line for a pair of keys.
	Explain(localKey, remoteKey uint32) string
}

// Yielder is implemented by a Peer that serves pairs for which the engine's chain through host memory may be the better
// way: so it was measured, or so the program has said.
type Yielder interface {
	// Yields returns why that chain, where there is one, should serve a pair of keys, or "" where the peer should.
	// It must be the same for as long as both keys are in use.
	Yields(localKey, remoteKey uint32) string
}

// Allocator is implemented by a Backend with memory of its own, which its peers
// reach better than memory from elsewhere. Register must take both.
type Allocator interface {
	// Alloc returns n bytes of DRAM as a segment of that length without a Secret:
	// zeroed, at an address that is a multiple of a page at least, outside the Go
	// heap. Each part of it may be registered and sliced as any segment, with other
	// backends as well: to those it is foreign unless it has a Shared. No bytes, or
	// more than there can be, must be an error that wraps ErrBounds; after
	// Backend.Close it must be ErrClosed. A backend that has no such memory as it is
	// configured must answer ErrNotSupported: other memory is then as good.
	//
	// The Closer gives the memory back. It is guaranteed to be closed after every
	// registration of the memory was; closing it must be idempotent and must not
	// wait for a peer. The memory outlives the backend: it must stay readable and
	// writable after Backend.Close, which leaves it out of what it gives back, until
	// its own Close, which must then give back what the backend kept for it.
	Alloc(n uint64) (Segment, io.Closer, error)
}

// AddrMax bounds Backend.Addr, TokenMax bounds Memory.AppendToken.
const (
	AddrMax  = 1 << 10 // 1 KiB: several rails, each a GID, a queue pair and a port
	TokenMax = 512     // a verbs token carries an rkey per rail
)

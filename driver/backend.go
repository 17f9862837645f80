// SPDX-License-Identifier: Apache-2.0

// Package driver is the contract between the engine and its backends. A backend moves bytes, by
// shared memory, sockets, a NIC, a disk or a copy engine.
//
// Comments here speak to the implementer. "Guaranteed" is what the engine
// promises before it calls, "must" is what the implementation promises in
// return, "may" is left to it. Package drivertest checks the musts.
//
// A backend implements three interfaces: Backend, Memory and Peer. The bits of Peer.Can say what a
// Peer can do beyond copying descriptors. BackendBase and PeerBase implement the optional methods,
// for a backend to embed. Start with package backends/mem, the reference.
//
// # What a completion means
//
// Other comments refer to this list:
//
//   - A Read that completed without error: the bytes are in local memory and
//     visible to every goroutine that learns of the completion.
//   - A Write that completed without error: the local bytes may be reused, and
//     the bytes are placed in the peer's memory. They are visible to the peer's
//     program once it has received a notification that was submitted with them
//     or later to the same peer, or once Revoke of that memory has returned nil.
//   - A completion with an error is as final as one without: from then on no
//     byte of the transfer lands, on either side. What had landed before stays,
//     and is not described. A backend that cannot prove this yet must not
//     complete yet.
//   - Every tag that Submit accepted completes exactly once, whatever happens
//     to the peer, to the connection or to the backend.
//   - The peer's program takes no part and need not call Poll. Nor does a transfer need Poll on
//     this side to make progress. Only its completion waits for Poll.
package driver

import (
	"context"
)

// Backend moves bytes between two kinds of memory.
//
// The engine is guaranteed to validate, bounds-check and split before it calls;
// a backend must nevertheless refuse what would touch bytes outside a
// registered range, since a peer is not the engine.
//
// All methods may be called by any goroutine at any time, except that Poll is
// guaranteed never to run twice at once, and neither is Receive.
type Backend interface {
	// Caps says what the backend can do. It must be constant and cheap.
	Caps() Caps

	// Addr is what a peer's Connect needs: opaque, at most AddrMax bytes,
	// constant, and free of secrets (tokens carry those).
	Addr() []byte

	// Register makes a range known and reachable by peers that hold its token.
	// It must not copy the bytes. Several registrations may overlap, and the
	// engine registers a part of a range once more to lease it, so registering
	// a part of known memory should be cheap. A kind of memory that Caps does
	// not list is answered with ErrNotSupported.
	Register(Segment) (Memory, error)

	// Connect opens the way to the backend with this Addr. Its own Addr is
	// allowed and serves local moves. Connecting twice gives two independent
	// Peers. It must return within ctx, and may not be cancelled by it later.
	Connect(ctx context.Context, addr []byte) (Peer, error)

	// Poll moves finished work into done and returns how many entries it
	// filled; 0 with a nil error means that nothing is ready. It must not block.
	// After Close it must deliver the completions that are left and then return ErrClosed.
	// If a batch completes during its Submit, Poll must return the completion once Submit has
	// returned: the engine is guaranteed to poll then, so such a completion needs no wake-up.
	Poll(done []Completion) (n int, err error)

	// FD is readable after a completion or a message arrived while armed, or when
	// a Submit or an Answer that found no room (ErrFull) may now succeed. The backend
	// owns it; it is an eventfd, and the engine is guaranteed to drain it.
	FD() int

	// Arm asks for one wake-up by FD, and the request stays in force whatever Arm returns. Ready
	// means that there may be a completion or a message already: poll before you sleep.
	Arm() (ready bool, err error)

	// Receive moves arrived messages into msgs and returns how many. The caller may keep
	// Message.Data. Receive must not block. Messages that are not received cause back-pressure:
	// the sender's Submit returns ErrFull.
	Receive(msgs []Message) (n int, err error)

	// Answer sends b, at most Caps.MessageMax bytes, over a connection that a peer opened, back to
	// that peer. conn is the Message.Conn of a message that arrived by it. The answer arrives as a
	// Message whose Conn is the Conn of the peer's Peer. Answer must not block, and the caller may
	// change b once it has returned. Answers of one connection arrive in order, each at most once,
	// and all of them unless the connection ends. ErrFull means that there is no room now: FD
	// becomes readable when there may be. ErrPeerLost: the connection has ended or is unknown.
	Answer(conn uint64, b []byte) error

	// Close ends every Peer (see Peer.Close) and every Memory, and releases all descriptors,
	// goroutines and mappings. It must be idempotent, and bounded in time even if a peer is
	// frozen. Afterwards Register, Connect, Import and Submit must return ErrClosed. The other
	// methods of the backend, its memories and its peers need only return.
	Close() error
}

// Reaper is a Backend whose own goroutines learn of completions and messages, and call the engine.
// That saves the wake-up by FD of a goroutine that only hands on.
type Reaper interface {
	// Reap gives what polls and receives. The backend may call it in place of a wake-up by FD, from
	// any goroutine that holds none of its locks; it does not block, but may call Answer and
	// Cancel. It serves others for a moment at most: where it reports more, a wake-up must follow.
	Reap(by func() (more bool))
}

// Memory is one registration.
type Memory interface {
	// Key names the memory in Desc.LocalKey. Keys are small numbers. A key may be reused for
	// another memory only after Revoke has returned nil.
	Key() uint32

	// AppendToken appends what a peer's Import needs to reach this memory. A
	// token must be useless without its secret (it begins with Segment.Secret,
	// 128 unguessable bits), must carry key, epoch and bounds, and must be refused with
	// ErrBadToken when it is cut, altered or another backend's. The epoch is the generation
	// of the key, and is not needed where no key is used again. Once Revoke was called it must
	// return ErrClosed.
	AppendToken(dst []byte) ([]byte, error)

	// Revoke ends the memory. Its epoch must end at once: every access that a peer begins
	// later is refused, also where ctx is over already or the proof fails. Revoke must return
	// nil only when no access that a peer began, or will begin, through a token of this
	// memory can still land. Then the memory is forgotten and its key is free.
	//
	// The engine is guaranteed to have no batch of its own under way that names the memory as
	// local, unless the backend is about to be closed. It asks first with a ctx that is over,
	// and again only after an error: nil to the first, where nothing need be waited for, saves
	// a goroutine. A frozen or dead peer must not make it wait for longer than the backend's
	// configured grace: then the strong means of that backend (fresh pages, a dead key, a
	// drained queue) complete the proof. ctx bounds it all the same; its error means that the
	// proof is not there. After an error the memory is of no use to peers, its key stays taken,
	// and Revoke may be called again: it looks for the proof again. After nil it returns nil.
	// Any number of goroutines may call it at once.
	Revoke(ctx context.Context) error
}

// Peer is a connection to another backend of the same type.
type Peer interface {
	// Can says what Submit accepts. It must be constant.
	Can() Can

	// Conn is the number that Message.Conn has for answers that come by this connection;
	// 0 without CanNotify. Numbers of connections that the backend opened and of those
	// that it accepted differ.
	Conn() uint64

	// Import makes the peer's memory known under a key for Desc.RemoteKey.
	// A token whose epoch has ended is answered with ErrRevoked, one that is cut,
	// altered or foreign with ErrBadToken (an alteration may also look like an
	// epoch that has ended), and one for which there is no room now, or whose pages a
	// Revoke replaces now, with ErrFull. Size is the range that offsets may use. Each call
	// gives a key of its own, to be dropped on its own.
	Import(token []byte) (key uint32, size uint64, err error)

	// Drop forgets an imported key. Transfers in flight are not disturbed.
	Drop(key uint32)

	// Submit starts one batch under a tag: all of it or none. It must not block
	// for the bytes. The tag is guaranteed to be unused. There are guaranteed to be at most
	// Caps.DescsMax descriptors, each of a length over 0, or Caps.RunsMax runs of a pattern
	// that has passed Pattern.Check, and the local memory to stay registered until the
	// tag completes. What Batch.Check refuses for Can must be refused, too.
	//
	// ErrFull means that nothing was started and that the engine will poll and try again;
	// any other error means that nothing was started and nothing will complete:
	// ErrBounds for an unknown key or a range outside its memory, ErrReadOnly,
	// ErrNotSupported where Can lacks a bit or Durable memory that cannot keep the
	// promise, ErrPeerLost once the loss is known. A key whose epoch has ended gives
	// ErrRevoked, here or as the outcome. Memory that is gone gives ErrFault, and nothing but
	// what the batch has named is unspecified then.
	//
	// A notification reaches the peer after the bytes of its batch are visible there, without
	// a further round trip and without any call on this side; the tag completes when it is
	// on its way. Notifications to one peer must arrive in the order of submission. That of
	// a batch which failed does not arrive while the connection stands; over a connection that was
	// lost it may have arrived: a program that needs certainty asks the peer.
	//
	// A durable batch completes without an error only once its bytes, and what is needed to find
	// them, would survive a loss of power: by a sync, say, that began after the last byte
	// was written and has ended well. One sync may serve any number of batches, and one
	// that fails must fail all that it was to serve. A batch that failed promises nothing.
	Submit(tag uint64, b *Batch) error

	// Cancel asks for the end of one tag. It must not block. The completion
	// still arrives, once, with ErrAborted or with the outcome that came first.
	// An unknown or finished tag is ignored.
	Cancel(tag uint64)

	// Help lets a goroutine that waits for a tag do the work of the batch itself: it copies the
	// bytes, or reads the completion, unless another goroutine already does. That saves a wake-up
	// and keeps the bytes in the cache of the caller's CPU. Help returns when it can do no more
	// for the batch, or at most one piece or a few milliseconds after stop was closed. It reports
	// whether it did anything. The engine is guaranteed to poll then, so a completion that Help
	// caused needs no wake-up. It may be called for any tag, by any number of goroutines.
	Help(tag uint64, stop <-chan struct{}) bool

	// Explain says in one line how bytes would move between the memories of two keys, and why:
	// for instance over which NIC, and through which staging memory.
	Explain(localKey, remoteKey uint32) string

	// Lost returns a channel that is closed once the connection is closed or known to be dead. A
	// peer is not lost because it is silent while nothing is outstanding.
	Lost() <-chan struct{}

	// Close ends the connection: every outstanding tag must complete (with
	// ErrClosed, unless it finished) before Close returns, under the same promise
	// as every completion, and without a call of Poll meanwhile. This is the strong
	// means of the engine against a frozen peer, so it must be bounded in time.
	Close() error
}

// AddrMax bounds Backend.Addr, TokenMax bounds Memory.AppendToken.
const (
	AddrMax  = 1 << 10 // 1 KiB: several rails, each a GID, a queue pair and a port
	TokenMax = 512     // a verbs token carries an rkey per rail
)

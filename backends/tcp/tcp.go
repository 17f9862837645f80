// SPDX-License-Identifier: Apache-2.0

// Package tcp moves bytes between any two hosts, with no library and no privilege.
//
// A peer has one connection for control and several for data, which carry frames (wire.go). The
// side that connects is the initiator, the other one the owner of the memory. Every connection
// speaks TLS 1.3, with certificates of both sides or with the key that the owner's address names,
// or plain text where the Config says so (secure.go). A connection that breaks ends its peer; a
// program connects anew.
//
// # A write
//
//   - Submit checks the batch against both memories, copies it and puts it into a queue
//     (initiator.go, batch.go). Of a small batch it also writes the frames.
//   - The writing half of each connection (send.go) asks for the next frame: putNext cuts a part of
//     at most 512 KiB off the batch. A part is a table of places, or a fragment of a pattern
//     (pattern.go), and its bytes follow from where they lie (ranges.go). Several connections carry
//     the parts of a large batch.
//   - The owner's reading goroutine takes the frame (receive.go, inbound.serve in owner.go).
//     landWrite checks its ticket and its bounds, has the bytes land piece by piece behind the gate
//     of the memory (landing.go), and queues an acknowledgement. The owner's program takes no part.
//   - The initiator's reading goroutine (peer.serve in peer.go) takes the acknowledgement: onAck.
//     With the last part the batch is complete, and Poll returns its completion (done.go). The
//     reading goroutine itself has the engine poll (handOver), and looks for the next frame for a
//     moment before it sleeps (look.go).
//   - A notification is sent when the bytes of all parts are read. The owner delivers it when all
//     parts have landed, over whichever connections they came (notify.go).
//
// A Read goes the same way without bytes: the owner queues it (queueRead), and its writing half
// answers with the bytes and an acknowledgement.
//
// # What is proved
//
// A revoke is the owner's alone (proof.go). A memory has a ticket, 64 bits that a peer is told if
// it has the token, and each piece is checked against it behind a gate. Revoke changes the ticket
// and then waits for the gate: pieces that held it have landed, and later ones are refused.
//
// The end of a batch is proved by the owner's acknowledgement. Where that does not come, nothing
// says that the owner has not read the bytes yet and will not put them in place: it may be frozen.
// So every frame of the initiator carries a time, and the owner lands nothing that is older than an
// age limit, unless it has asked and the initiator still wants it. Close, and the loss of a
// connection, end when the owner says that it has stopped, or when all that was sent is older than
// the limit (shutDown in peer.go).
//
// # Beside these
//
// connect.go and listen.go open connections, secure.go encrypts them; session.Lobby bounds those
// that have not sent their first frame, Config.PeersMax the others. pulse.go gives up hosts that
// are gone. address.go has what an Addr says. conn.go has what both ends of a connection share.
package tcp

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/identity"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/session"
)

// Backend implements driver.Backend.
type Backend struct {
	cfg            Config
	clock          clock.Clock
	identity       *identity.Identity // for security certified
	ownKey         *ownKey            // for security pinned
	address        address
	encodedAddress []byte
	listener       *net.TCPListener
	event          *proc.Event // wakes the program, which sleeps on FD
	tasks          session.Tasks
	entry          session.Gate // Register and pulse are in it
	closing        sync.Once
	closeErr       error
	closed         atomic.Bool
	armed          atomic.Bool // the program sleeps on event
	roomNews       atomic.Bool // there is room again after ErrFull; Arm reports it once
	reap           atomic.Pointer[func() bool]
	queryOutbound  func(*conn) session.Outbound

	memories   session.KeyTable[memory]
	done       session.Completions
	inbox      inbox
	looks      looks
	chunks     freeList[chunk]
	batches    freeList[batch]
	handshakes *session.Lobby
	lastConnID atomic.Uint64

	mu             sync.Mutex // guards what follows
	peers          map[*peer]struct{}
	accepted       map[uint64]*inbound // by session
	acceptedByConn map[uint64]*inbound // by connID
	byHost         session.HostCount   // places of PeersMax that are taken
	pulseTimer     clock.Timer         // calls pulse
	lastPulse      int64
	pulseCount     uint // of pulse alone
}

var (
	_ driver.Backend = (*Backend)(nil)
	_ driver.Reaper  = (*Backend)(nil)
	_ driver.Peer    = (*peer)(nil)
)

// New opens the port, and starts a goroutine that accepts peers and a timer that calls pulse.
func New(cfg Config) (*Backend, error) { return newBackend(cfg, clock.Host()) }

func newBackend(cfg Config, clock clock.Clock) (*Backend, error) {
	cfg.EnsureDefaults()
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("tcp: %w", err)
	}
	secure, how, err := cfg.secure()
	if err != nil {
		return nil, fmt.Errorf("tcp: %w", err)
	}
	b := &Backend{
		cfg: cfg, clock: clock, identity: secure,
		queryOutbound: func(c *conn) session.Outbound { return session.QueryOutbound(c.raw) },
		memories:      session.KeyTable[memory]{Most: cfg.KeysMax},
		peers:         map[*peer]struct{}{}, accepted: map[uint64]*inbound{},
		acceptedByConn: map[uint64]*inbound{}, byHost: session.HostCount{Most: cfg.PeersMax},
		handshakes: session.NewLobby(cfg.Handshakes, clock),
	}
	b.address = address{owner: session.NewOwner(), security: how}
	if how == pinned {
		if b.ownKey, err = newOwnKey(); err != nil {
			return nil, fmt.Errorf("tcp: %w", err)
		}
		b.address.pin = b.ownKey.pin
	}
	b.done.Init(cfg.BatchesMax)
	b.chunks.most, b.batches.most = chunksKept, cfg.BatchesMax
	if err := b.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("tcp: %w", err), b.release())
	}
	b.tasks.Start(func() { _ = b.handshakes.Serve(b.listener, b.acceptStranger) }) // until Close
	b.schedulePulse(clock.Now())
	return b, nil
}

func (b *Backend) open() (err error) {
	if b.event, err = proc.NewEvent(); err != nil {
		return err
	}
	if err := b.listen(); err != nil {
		return err
	}
	b.encodedAddress, err = b.address.encode()
	return err
}

// release closes what open has opened.
func (b *Backend) release() error {
	var errs []error
	if b.listener != nil {
		errs = append(errs, b.listener.Close())
	}
	if b.event != nil {
		errs = append(errs, b.event.Close())
	}
	return errors.Join(errs...)
}

// Caps implements driver.Backend.
func (b *Backend) Caps() driver.Caps { return b.cfg.caps() }

// Addr implements driver.Backend.
func (b *Backend) Addr() []byte { return b.encodedAddress }

// Close implements driver.Backend.
func (b *Backend) Close() error {
	b.closing.Do(func() { b.closeErr = b.close() })
	return b.closeErr
}

func (b *Backend) close() error {
	b.entry.Shut()
	b.mu.Lock()
	b.closed.Store(true)
	b.pulseTimer.Stop()
	peers, accepted := slices.Collect(maps.Keys(b.peers)), slices.Collect(maps.Values(b.accepted))
	b.mu.Unlock()
	b.handshakes.Close()
	var wg sync.WaitGroup
	for _, p := range peers {
		wg.Go(func() { _ = p.Close() }) // returns no error
	}
	wg.Wait()
	for _, g := range accepted {
		g.end(false)
	}
	b.entry.Wait()
	for _, m := range b.memories.All() {
		_ = m.Revoke(context.Background()) // fails only if its context ends
	}
	err := b.release()
	b.tasks.Wait()
	return err
}

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
//     (initiator.go, batch.go). Of a small one it also writes the frames.
//   - The writing half of each connection (send.go) asks its end for the next frame: next cuts a
//     part of at most 512 KiB off the batch, a table of places or a fragment of a pattern
//     (pattern.go), and the bytes follow from where they lie (ranges.go). Several connections carry
//     the parts of a large batch.
//   - The owner's reading goroutine (owner.go, serve) takes the frame (receive.go). landWrite
//     checks its ticket and its bounds, has the bytes land piece by piece behind the gate of the
//     memory (landing.go), and answers. Its program takes no part.
//   - The initiator's reading goroutine (peer.go, serve) takes the answer: onAck. The batch is over
//     with its last part, and Poll finds its completion (done.go).
//   - A notification follows when all parts are read. The owner delivers it when all of them are in
//     place, over whichever connections they came (notify.go).
//
// A read is a frame that asks: the owner queues it, and its writing half answers with the bytes and
// an acknowledgement.
//
// # What is proved
//
// A revoke is the owner's alone (proof.go): memory has a ticket, 64 bits that a peer learns for the
// token, which is compared before each piece, behind a gate. Revoke draws another ticket and then
// waits for the gate: what held it has landed, what comes later is refused.
//
// The end of a batch is the owner's word, an acknowledgement. Where that does not come, nothing
// proves that the owner has not read the bytes yet and will not put them in place: it may be
// frozen. So all that the initiator sends carries a time, and the owner lands nothing that is older
// than an age limit, unless it has asked and the initiator still wants it. Close, and the loss of a
// connection, end with the owner's word that it has stopped, or when all that was sent is older
// than the limit (shutDown in peer.go).
//
// # Beside these
//
// connect.go and listen.go open connections; session.Lobby bounds those that have not said what
// they are for, Config.PeersMax the others. pulse.go gives up hosts that are gone. address.go says
// where an owner is found.
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
	cfg      Config
	clock    clock.Clock
	secure   *identity.Identity // where we are certified
	own      *ownKey            // where we are pinned
	address  address
	addr     []byte
	listener *net.TCPListener
	event    *proc.Event
	tasks    session.Tasks
	entry    session.Gate // Register and pulse are in it
	closing  sync.Once
	closeErr error
	closed   atomic.Bool
	armed    atomic.Bool // a goroutine sleeps on event
	news     atomic.Bool // something for the sleeper that is in no queue
	kernel   func(*conn) session.Outbound

	memories   session.KeyTable[memory]
	done       session.Completions
	inbox      inbox
	chunks     freeList[chunk]
	batches    freeList[batch]
	handshakes *session.Lobby
	lastConn   atomic.Uint64 // numbers of connections given out

	mu       sync.Mutex // guards what follows
	peers    map[*peer]struct{}
	accepted map[uint64]*inbound // by session
	byConn   map[uint64]*inbound
	byHost   session.HostCount // places of PeersMax that are taken
	pulsing  clock.Timer       // until the next pulse
	beat     int64             // when the last one was
	beats    uint              // how many there were; of pulse
}

var (
	_ driver.Backend = (*Backend)(nil)
	_ driver.Peer    = (*peer)(nil)
)

// New starts a backend: its port, one goroutine that accepts peers, and a timer that looks after
// those that owe us an answer.
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
		cfg: cfg, clock: clock, secure: secure,
		kernel:   func(c *conn) session.Outbound { return session.QueryOutbound(c.raw) },
		memories: session.KeyTable[memory]{Most: cfg.KeysMax},
		peers:    map[*peer]struct{}{}, accepted: map[uint64]*inbound{},
		byConn: map[uint64]*inbound{}, byHost: session.HostCount{Most: cfg.PeersMax},
		handshakes: session.NewLobby(cfg.Handshakes, clock),
	}
	b.address = address{owner: session.NewOwner(), security: how}
	if how == pinned {
		if b.own, err = newOwnKey(); err != nil {
			return nil, fmt.Errorf("tcp: %w", err)
		}
		b.address.pin = b.own.pin
	}
	b.done.Init(cfg.BatchesMax)
	b.chunks.most, b.batches.most = chunksKept, cfg.BatchesMax
	if err := b.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("tcp: %w", err), b.release())
	}
	b.tasks.Start(func() { _ = b.handshakes.Serve(b.listener, b.welcome) }) // until Close
	b.awaitPulse(clock.Now())
	return b, nil
}

func (b *Backend) open() (err error) {
	if b.event, err = proc.NewEvent(); err != nil {
		return err
	}
	if err := b.listen(); err != nil {
		return err
	}
	b.addr, err = b.address.encode()
	return err
}

// release gives back what open made.
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
func (b *Backend) Addr() []byte { return b.addr }

// Close implements driver.Backend.
func (b *Backend) Close() error {
	b.closing.Do(func() { b.closeErr = b.close() })
	return b.closeErr
}

func (b *Backend) close() error {
	b.entry.Shut()
	b.mu.Lock()
	b.closed.Store(true)
	b.pulsing.Stop()
	peers, accepted := slices.Collect(maps.Keys(b.peers)), slices.Collect(maps.Values(b.accepted))
	b.mu.Unlock()
	b.handshakes.Close()
	var wg sync.WaitGroup
	for _, p := range peers {
		wg.Go(func() { _ = p.Close() }) // a peer's Close has nothing to report
	}
	wg.Wait()
	for _, g := range accepted {
		g.end(false)
	}
	b.entry.Wait()
	for _, m := range b.memories.All() {
		_ = m.Revoke(context.Background()) // never fails
	}
	err := b.release()
	b.tasks.Wait()
	return err
}

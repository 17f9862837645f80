// SPDX-License-Identifier: Apache-2.0

// Package tcp moves bytes between any two hosts, with no library and no privilege.
//
// A peer has one connection for control and several for data. A Write is frames that say
// where their bytes go, a Read is frames that ask for some, and the owner's goroutines serve
// both without its program. So a revoke is local: a new ticket, which is compared
// before each piece. What has lain in sockets for too long, such as those of an owner that was
// frozen, lands only if the initiator confirms that it still wants it. Close and the loss of a
// connection end with the word of the owner that it has stopped, or when all that was sent is
// too old to land. A connection that breaks ends its peer; a program connects anew.
//
// Every connection speaks TLS 1.3, with certificates of both sides or with the key that the owner's
// address names, or plain text where the Config says so.
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
	chunks     chunks
	batches    batches
	handshakes *session.Lobby
	quotas     quotas
	lastConn   atomic.Uint64 // numbers of connections given out

	mu       sync.Mutex // guards what follows
	peers    map[*peer]struct{}
	accepted map[uint64]*inbound // by session
	byConn   map[uint64]*inbound
	byHost   session.HostCount // how many of them
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
	b.quotas.init(&cfg)
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
	peers := make([]*peer, 0, len(b.peers))
	for p := range b.peers {
		peers = append(peers, p)
	}
	accepted := slices.Collect(maps.Values(b.accepted))
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

// leave forgets a peer that has ended.
func (b *Backend) leave(p *peer) {
	b.mu.Lock()
	delete(b.peers, p)
	b.mu.Unlock()
}

// batches are those that are not in use. There are never more than BatchesMax in use.
type batches struct {
	mu   sync.Mutex
	free []*batch
}

func (s *batches) take() *batch {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.free); n > 0 {
		x := s.free[n-1]
		s.free = s.free[:n-1]
		return x
	}
	return &batch{}
}

func (s *batches) give(x *batch) {
	x.reset()
	s.mu.Lock()
	s.free = append(s.free, x)
	s.mu.Unlock()
}

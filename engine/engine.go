// SPDX-License-Identifier: Apache-2.0

// Package engine is the public API of sluice. A program opens one Engine, names
// the memory that it registers, exchanges descriptions with its peers, and posts
// one-sided reads and writes as Transfers. Which backend moves the bytes is a
// Route, chosen by the kinds of memory, by where the peer is and by cost, and
// explained by Explain.
//
// Package engine is pure Go and knows the contract of package driver, no
// backend. Except where a type says otherwise, all methods may be called from any
// goroutine.
package engine

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/engine/internal/exchange"
	"github.com/sluicehq/sluice/internal/wire"
)

// Engine is one participant: its backends, its regions and its peers.
type Engine struct {
	cfg   Config
	id    wire.ID
	host  wire.ID
	born  time.Time // base of the monotonic clock of the hot path
	lanes []*lane   // of Config.Backends; last, the stager's

	stager *stager

	mu      sync.Mutex // guards what follows; never held across a backend's call that may block
	closed  bool
	regions map[string]*Region
	sorted  []*Region // those of them that Describe tells of, by name; nil: to be looked for
	peers   map[*Peer]struct{}
	places  int // in peers, for those that connect now
	private int // of peers
	self    *Peer

	localSelf *Peer // see local
	leases    map[*Lease]struct{}
	tickets   map[exchange.Secret]*ticket
	guests    guests

	lastPeer     uint64 // guarded by mu
	peersVersion atomic.Uint64

	slots   slots
	sweeper sweeper
	inbox   chan Notification
	inboxed inboxBytes
	joining joining
	pace    pace
	dropped atomic.Uint64 // completions that no transfer waited for
	givenUp givenUp

	life      context.Context // ends as Close begins
	endLife   context.CancelFunc
	closing   chan struct{} // closed when all that peers reach is closed
	closeOnce sync.Once
	closeErr  error          // of the one Close
	running   sync.WaitGroup // goroutines that end with the engine
}

// Open starts an engine. It owns the backends from here on, also when it fails.
func Open(cfg Config) (*Engine, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, errors.Join(err, closeBackends(cfg.Backends))
	}
	e := &Engine{
		cfg: cfg, host: hostID(), born: time.Now(),
		regions: map[string]*Region{}, sorted: []*Region{}, peers: map[*Peer]struct{}{},
		leases:  map[*Lease]struct{}{},
		tickets: map[exchange.Secret]*ticket{}, guests: newGuests(&cfg),
		joining: joining{most: cfg.NotificationBytes},
		inbox:   make(chan Notification, cfg.NotificationsMax), closing: make(chan struct{}),
	}
	rand.Read(e.id[:])
	e.peersVersion.Store(1)
	e.life, e.endLife = context.WithCancel(context.Background())
	e.slots.init(cfg.TransfersMax)
	e.sweeper.init(e)
	for i, b := range cfg.Backends {
		l, err := newLane(e, i, b)
		if err != nil {
			for _, opened := range e.lanes {
				opened.close()
			}
			e.endLife()
			return nil, errors.Join(&OpError{Op: "open", Backend: b.Caps().Name, Err: err},
				closeBackends(cfg.Backends))
		}
		e.lanes = append(e.lanes, l)
	}
	e.addStager()
	for _, l := range e.lanes[:len(cfg.Backends)] {
		l.start()
	}
	return e, nil
}

// Name returns Config.Name.
func (e *Engine) Name() string { return e.cfg.Name }

// now is the time since Open: monotonic, cheap, and small enough to store in one
// atomic word.
func (e *Engine) now() time.Duration { return time.Since(e.born) }

// Limits of names in use are reported with what to do about them.
func fullError(what string, limit int, field string) error {
	return fmt.Errorf("%d %s are in use: close some or raise Config.%s: %w", limit, what, field,
		ErrFull)
}

// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"fmt"
	"maps"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/engine"
)

// Mux deals the notifications of an engine out to the handlers that want them, by the
// first byte of the message, so that hand-over and other users share an engine.
// It is the only reader of Engine.Notifications.
type Mux struct {
	eng     *engine.Engine
	dropped atomic.Uint64
	stop    chan struct{}
	ended   chan struct{}
	once    sync.Once

	mu       sync.RWMutex
	handlers map[origin]*handler
	rest     func(engine.Notification)
}

// origin is which messages a handler wants.
type origin struct {
	first byte
	id    [16]byte // of an engine; zero: of any
}

type handler struct {
	f   func(engine.Notification)
	all bool // it wants to know of all peers that are lost
}

// NewMux starts to read the notifications of an engine.
func NewMux(eng *engine.Engine) *Mux {
	m := &Mux{eng: eng, stop: make(chan struct{}), ended: make(chan struct{}),
		handlers: map[origin]*handler{}}
	go m.run()
	return m
}

// Handle has f called for each message that begins with that byte, in order, and
// once with the Err of each peer that was lost. All handlers share one
// goroutine: f must not wait for anything. ErrBusy means that the byte is taken.
// The bytes 0xB1 to 0xB4 are this package's.
func (m *Mux) Handle(first byte, f func(engine.Notification)) error {
	_, err := m.handle(first, nil, f)
	return err
}

// handle is Handle for the messages of some peers; nil: of all.
func (m *Mux) handle(first byte, peers []*engine.Peer, f func(engine.Notification)) (*handler,
	error) {
	h, of := &handler{f, peers == nil}, []origin{{first: first}}
	if peers != nil {
		of = of[:0]
	}
	for _, p := range peers {
		of = append(of, origin{first, p.ID()})
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, o := range of {
		if m.handlers[o] != nil {
			return nil, fmt.Errorf("handle messages that begin with %#x: a Mux has one Sender and "+
				"one Receiver, and one of each for a group of ranks: %w", first, engine.ErrBusy)
		}
	}
	for _, o := range of {
		m.handlers[o] = h
	}
	return h, nil
}

// HandleRest is Handle for every message that no other handler wants. Without it they
// are dropped.
func (m *Mux) HandleRest(f func(engine.Notification)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.rest = f
}

// Forget ends Handle. A call of the handler may still be under way.
func (m *Mux) Forget(first byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.handlers, origin{first: first})
}

// forget ends handle, and nothing that came after it.
func (m *Mux) forget(h *handler) {
	m.mu.Lock()
	defer m.mu.Unlock()
	maps.DeleteFunc(m.handlers, func(_ origin, other *handler) bool { return other == h })
}

// Dropped counts the messages that no handler wanted.
func (m *Mux) Dropped() uint64 { return m.dropped.Load() }

// Close stops reading. It must not be called by a handler. It is idempotent.
func (m *Mux) Close() {
	m.once.Do(func() { close(m.stop) })
	<-m.ended
}

func (m *Mux) run() {
	defer close(m.ended)
	for {
		select {
		case n, open := <-m.eng.Notifications():
			if !open {
				return
			}
			m.deal(n)
		case <-m.stop:
			return
		}
	}
}

func (m *Mux) deal(n engine.Notification) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if n.Err != nil {
		for _, h := range m.handlers {
			if h.all {
				h.f(n)
			}
		}
	} else if len(n.Data) > 0 {
		h := m.handlers[origin{first: n.Data[0]}]
		if n.Peer != nil { // the one that connected last: groups know the engine
			if of := m.handlers[origin{n.Data[0], n.Peer.ID()}]; of != nil {
				h = of
			}
		}
		if h != nil {
			h.f(n)
			return
		}
	}
	if m.rest != nil {
		m.rest(n)
	} else if n.Err == nil {
		m.dropped.Add(1)
	}
}

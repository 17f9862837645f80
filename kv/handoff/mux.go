// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"fmt"
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
	handlers map[origin]func(engine.Notification)
	rest     func(engine.Notification)
}

// origin is which messages a handler wants.
type origin struct {
	first byte
	peer  *engine.Peer // nil: of any
}

// NewMux starts to read the notifications of an engine.
func NewMux(eng *engine.Engine) *Mux {
	m := &Mux{eng: eng, stop: make(chan struct{}), ended: make(chan struct{}),
		handlers: map[origin]func(engine.Notification){}}
	go m.run()
	return m
}

// Handle has f called for each message that begins with that byte, in order, and
// once with the Err of each peer that was lost. All handlers share one
// goroutine: f must not wait for anything. ErrBusy means that the byte is taken.
// The bytes 0xB1 to 0xB4 are this package's.
func (m *Mux) Handle(first byte, f func(engine.Notification)) error {
	return m.handle(first, []*engine.Peer{nil}, f)
}

// handle is Handle for the messages of some peers.
func (m *Mux) handle(first byte, peers []*engine.Peer, f func(engine.Notification)) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range peers {
		if m.handlers[origin{first, p}] != nil {
			return fmt.Errorf("handle messages that begin with %#x: a Mux has one Sender and one "+
				"Receiver, and one of each for a group of ranks: %w", first, engine.ErrBusy)
		}
	}
	for _, p := range peers {
		m.handlers[origin{first, p}] = f
	}
	return nil
}

// HandleRest is Handle for every message that no other handler wants. Without it they
// are dropped.
func (m *Mux) HandleRest(f func(engine.Notification)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.rest = f
}

// Forget ends Handle. A call of the handler may still be under way.
func (m *Mux) Forget(first byte) { m.forget(first, []*engine.Peer{nil}) }

func (m *Mux) forget(first byte, peers []*engine.Peer) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range peers {
		delete(m.handlers, origin{first, p})
	}
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
		for of, f := range m.handlers {
			if of.peer == nil {
				f(n)
			}
		}
	} else if len(n.Data) > 0 {
		for _, peer := range []*engine.Peer{n.Peer, nil} {
			if f := m.handlers[origin{n.Data[0], peer}]; f != nil {
				f(n)
				return
			}
		}
	}
	if m.rest != nil {
		m.rest(n)
	} else if n.Err == nil {
		m.dropped.Add(1)
	}
}

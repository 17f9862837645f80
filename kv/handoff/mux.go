// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/engine"
)

// Mux distributes the notifications of an engine to ranks of groups, by the first byte of the
// message and its sender, so that hand-over and other users can share an engine. It is the only
// reader of Engine.Notifications.
type Mux struct {
	eng   *engine.Engine
	stop  chan struct{}
	ended chan struct{}
	once  sync.Once

	mu       sync.RWMutex
	handlers map[origin]handler
	rest     func(engine.Notification)
}

// origin says which messages a handler gets.
type origin struct {
	first byte
	id    [16]byte // of an engine
}

// handler is called for each message, in order. All handlers share one goroutine, so none may wait.
type handler func(engine.Notification)

// NewMux starts to read the notifications of an engine.
func NewMux(eng *engine.Engine) *Mux {
	m := &Mux{eng: eng, stop: make(chan struct{}), ended: make(chan struct{}),
		handlers: map[origin]handler{}}
	go m.run()
	return m
}

// handle has h called for the messages of some peers that begin with that byte. forget ends it, and
// waits for a call that is under way.
func (m *Mux) handle(first byte, peers []*engine.Peer, h handler) (forget func(), err error) {
	var of []origin
	for _, p := range peers {
		of = append(of, origin{first, p.ID()})
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, o := range of {
		if m.handlers[o] != nil {
			return nil, fmt.Errorf("handle messages that begin with %#x: a Mux has one sender and "+
				"one receiver for a group of ranks: %w", first, engine.ErrBusy)
		}
	}
	for _, o := range of {
		m.handlers[o] = h
	}
	return sync.OnceFunc(func() { // and nothing that comes after it
		m.mu.Lock()
		defer m.mu.Unlock()
		for _, o := range of {
			delete(m.handlers, o)
		}
	}), nil
}

// HandleRest has f called for every other message, in order, and once with the Err of each peer
// that was lost. It must not wait. Without it such messages are dropped. The first bytes 0xB3
// and 0xB4 are this package's.
func (m *Mux) HandleRest(f func(engine.Notification)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.rest = f
}

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
	h := handler(m.rest)
	if n.Err == nil && len(n.Data) > 0 {
		if n.Peer != nil { // the one that connected last: groups know the engine
			if of := m.handlers[origin{n.Data[0], n.Peer.ID()}]; of != nil {
				h = of
			}
		}
	}
	if h != nil {
		h(n)
	}
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"crypto/rand"
	"sync/atomic"

	"github.com/sluicehq/sluice/engine/internal/exchange"
)

// ticket proves that a connection comes from the engine with which descriptions were
// exchanged (Serve, Dial): that engine alone has been given the secret, and shows it in the
// hello of each of its connections.
type ticket struct {
	secret  exchange.Secret
	private bool                 // for a Peer that the program never has
	origin  string               // what its exchange was made with; "": this engine itself
	guest   *guest               // nil: of an exchange that this engine began
	peer    atomic.Pointer[Peer] // once this engine has connected, too
}

// issueTicket makes a ticket for another engine, valid until revokeTicket.
func (e *Engine) issueTicket(origin string) *ticket {
	t := &ticket{origin: origin}
	rand.Read(t.secret[:])
	if origin != "" {
		e.stager.exchanged.Store(true)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.tickets[t.secret] = t
	return t
}

func (e *Engine) revokeTicket(t *ticket) {
	if t == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.tickets, t.secret)
}

// bind makes the ticket stand for a Peer.
// Preconditions: e.mu is held.
func (t *ticket) bind(p *Peer) {
	p.ticket = t
	t.peer.Store(p)
	if t.guest != nil {
		t.guest.bound = true
	}
}

// hello is the first message of each connection.
func (e *Engine) hello(show exchange.Secret) []byte {
	h := exchange.Hello{ID: e.id, Show: show, Name: e.cfg.Name}
	return h.Append(nil)
}
